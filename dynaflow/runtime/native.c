/* What a recording's call looks at, for every weight and on every call: where each tensor is, and the copies of its inputs.
 *
 * Compiled where it runs (native.py), against nothing: torch's functions, Python's and the driver's come as pointers. A tensor's Python
 * object holds torch's tensor at an offset that native.py finds and tries out. Called with the interpreter's lock held.
 */
#include <stdint.h>

struct torch {
    void *(*item)(void *list, int64_t number);
    int32_t (*address)(const void *tensor, void **found);
    int32_t (*num_dims)(const void *tensor, int64_t *found);
    int32_t (*sizes)(const void *tensor, int64_t **found);
    int32_t (*strides)(const void *tensor, int64_t **found);
    int32_t (*facts[3])(const void *tensor, int32_t *found); /* dtype, kind of device, number of device */
    int64_t type_at, flag_at, tensor_at; /* flag_at: a byte that is zero where the object's tensor is its own; negative: none */
};

/* an argument as it was; num_dims: how many sizes and strides follow in `lie`, sizes first; negative: it may lie, and be, what it likes */
struct argument {
    int64_t number;
    void *type;
    int64_t num_dims;
    const int64_t *lie;
    int32_t facts[3];
};

/* memory from begin to before end */
struct range {
    char *begin, *end;
};

struct fit {
    const struct torch *torch;
    int64_t num_copied, num_changed, num_bound;
    const struct argument *copied; /* must not lie in what is changed */
    const struct range *changed;
    const struct argument *bound; /* must be where they were */
    void *const *addresses;
};

struct feed {
    const struct torch *torch;
    struct argument argument;
    uint64_t alignment;
    uint64_t *source;                 /* where the kernel's node takes its first parameter from */
    int32_t (*set)(void *graph, void *node, const void *params);
    void *graph, *node;
    const void *params;
};

/* whether a tensor is of another kind, or lies otherwise; strides of dims of size 1 mean nothing */
static int differs(const struct torch *torch, const void *tensor, const struct argument *argument) {
    int64_t num_dims, *sizes, *strides;
    int32_t fact;
    for (int i = 0; i < 3; i++)
        if (torch->facts[i](tensor, &fact) || fact != argument->facts[i]) return 1;
    if (torch->num_dims(tensor, &num_dims) || num_dims != argument->num_dims) return 1;
    if (torch->sizes(tensor, &sizes) || torch->strides(tensor, &strides)) return 1;
    for (int64_t i = 0; i < num_dims; i++)
        if (sizes[i] != argument->lie[i] || (sizes[i] != 1 && strides[i] != argument->lie[num_dims + i])) return 1;
    return 0;
}

/* where an argument's memory is; 0 for success */
static int find(const struct torch *torch, void *args, const struct argument *argument, void **found) {
    char *object = torch->item(args, argument->number);
    if (!object || *(void **)(object + torch->type_at) != argument->type) return 1;
    if (torch->flag_at >= 0 && object[torch->flag_at]) return 1;
    const void *tensor = object + torch->tensor_at;
    return (argument->num_dims >= 0 && differs(torch, tensor, argument)) || torch->address(tensor, found);
}

/* 0: all arguments are where a recording may take them to be */
int fit(void *args, const struct fit *fit) {
    char *found;
    for (int64_t i = 0; i < fit->num_copied; i++) {
        if (find(fit->torch, args, &fit->copied[i], (void **)&found)) return 1;
        for (int64_t j = 0; j < fit->num_changed; j++)
            if (fit->changed[j].begin <= found && found < fit->changed[j].end) return 1;
    }
    for (int64_t i = 0; i < fit->num_bound; i++)
        if (find(fit->torch, args, &fit->bound[i], (void **)&found) || found != fit->addresses[i]) return 1;
    return 0;
}

/* The recording's copies read from these arguments from now on. Returns how many do: the next one lies otherwise, or was refused. */
int64_t feed(void *args, const struct feed *feeds, int64_t first, int64_t num_feeds) {
    for (int64_t i = first; i < num_feeds; i++) {
        const struct feed *each = &feeds[i];
        void *found;
        if (find(each->torch, args, &each->argument, &found) || (uint64_t)found % each->alignment) return i;
        *each->source = (uint64_t)found;
        if (each->set(each->graph, each->node, each->params)) return i;
    }
    return num_feeds;
}
