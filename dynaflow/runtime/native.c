/* What a recording's call looks at, for every weight and on every call: where each tensor is, and the copies of its inputs.
 *
 * Compiled where it runs (native.py), against nothing: torch's functions and the driver's come as pointers, and where objects of Python's
 * and torch's hold what is looked for, native.py finds and tries out. Called with the interpreter's lock held.
 */
#include <stdint.h>

struct torch {
    int32_t (*address)(const void *tensor, void **found);
    int32_t (*num_dims)(const void *tensor, int64_t *found);
    int32_t (*sizes)(const void *tensor, int64_t **found);
    int32_t (*strides)(const void *tensor, int64_t **found);
    int32_t (*facts[3])(const void *tensor, int32_t *found); /* dtype, kind of device, number of device */
    void *list, *tuple; /* their classes */
    int64_t type_at, count_at, list_at, tuple_at; /* of any object, of either, of the first item's: list_at has a pointer to it */
    int64_t flag_at, tensor_at; /* of a tensor's object; flag_at: a byte that is zero where its tensor is its own; negative: none */
    int64_t storage_at, offset_at, data_at; /* of a tensor, of a tensor, of a storage */
};

/* an argument as it was; num_dims: how many sizes and strides follow in `lie`, sizes first; negative: it may lie, and be, what it likes */
struct argument {
    int64_t number;
    void *type;
    int64_t num_dims;
    const int64_t *lie;
    int32_t facts[3];
};

/* where an argument was; data: of its storage, null where that is not enough to know. There are hundreds: it is small. */
struct place {
    int64_t number;
    void *type, *data;
    int64_t offset;
};

/* what stands somewhere in memory that stays */
struct word {
    const int64_t *at;
    int64_t value;
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
    const struct place *bound; /* must be where they were */
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

/* what is given for an argument: an item of a list or a tuple */
static char *item_of(const struct torch *torch, const char *args, int64_t number) {
    const void *type = *(void *const *)(args + torch->type_at);
    if (number >= *(const int64_t *)(args + torch->count_at)) return 0;
    if (type == torch->tuple) return ((char *const *)(args + torch->tuple_at))[number];
    if (type == torch->list) return (*(char *const *const *)(args + torch->list_at))[number];
    return 0;
}

/* whether an object is of this class and has its tensor itself */
static int is_plain(const struct torch *torch, const char *object, const void *type) {
    return *(void *const *)(object + torch->type_at) == type && (torch->flag_at < 0 || !object[torch->flag_at]);
}

/* where an argument's memory is; 0 for success */
static int find(const struct torch *torch, const void *args, const struct argument *argument, void **found) {
    const char *object = item_of(torch, args, argument->number);
    if (!object || !is_plain(torch, object, argument->type)) return 1;
    const void *tensor = object + torch->tensor_at;
    return (argument->num_dims >= 0 && differs(torch, tensor, argument)) || torch->address(tensor, found);
}

/* Arguments are looked at together: each look at one waits for memory, and those at others need not wait for that. */
#define CHUNK 64

/* whether these of the bound arguments are where they were */
static int are_there(const struct fit *fit, const void *args, int64_t first, int64_t count) {
    const struct torch *torch = fit->torch;
    const struct place *places = fit->bound + first;
    char *objects[CHUNK], *tensors[CHUNK], *storages[CHUNK];
    void *found;
    for (int64_t i = 0; i < count; i++) {
        if (!(objects[i] = item_of(torch, args, places[i].number))) return 0;
        __builtin_prefetch(objects[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        if (!is_plain(torch, objects[i], places[i].type)) return 0;
        tensors[i] = *(char **)(objects[i] + torch->tensor_at);
        __builtin_prefetch(tensors[i] + torch->storage_at);
        __builtin_prefetch(tensors[i] + torch->offset_at);
    }
    for (int64_t i = 0; i < count; i++) {
        storages[i] = *(char **)(tensors[i] + torch->storage_at);
        __builtin_prefetch(storages[i] + torch->data_at);
    }
    for (int64_t i = 0; i < count; i++) {
        const struct place *place = &places[i];
        int is_same = place->data && storages[i] && *(void **)(storages[i] + torch->data_at) == place->data &&
                      *(int64_t *)(tensors[i] + torch->offset_at) == place->offset;
        if (!is_same && (torch->address(objects[i] + torch->tensor_at, &found) || found != fit->addresses[first + i])) return 0;
    }
    return 1;
}

/* 0: all arguments are where a recording may take them to be */
int fit(void *args, const struct fit *fit) {
    char *found;
    for (int64_t i = 0; i < fit->num_copied; i++) {
        if (find(fit->torch, args, &fit->copied[i], (void **)&found)) return 1;
        for (int64_t j = 0; j < fit->num_changed; j++)
            if (fit->changed[j].begin <= found && found < fit->changed[j].end) return 1;
    }
    for (int64_t i = 0; i < fit->num_bound; i += CHUNK)
        if (!are_there(fit, args, i, fit->num_bound - i < CHUNK ? fit->num_bound - i : CHUNK)) return 1;
    return 0;
}

/* 0: every word is what it was */
int differ(const struct word *words, int64_t num_words) {
    for (int64_t i = 0; i < num_words; i++)
        if (*words[i].at != words[i].value) return 1;
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
