/* What a recording's call looks at, for every weight and on every call: where each tensor is, and the copies of its inputs.
 *
 * Compiled where it runs (native.py), without headers: torch's functions and the driver's come as pointers, Python's few are declared
 * here, and where objects of Python's and torch's hold what is looked for, native.py finds and tries out. Called with the interpreter's
 * lock held.
 */
#include <stdint.h>

/* Python's own, of its stable interface; the process has them, as it has them for every extension module */
struct method {
    const char *name;
    void *(*function)(void *self, void *arg);
    int flags;
    const char *doc;
};
enum { NO_ARGS = 4, ONE_ARG = 8 };
extern void *PyCFunction_NewEx(struct method *method, void *self, void *module);
extern void *PyCapsule_New(void *pointer, const char *name, void *destructor);
extern void *PyCapsule_GetPointer(void *capsule, const char *name);
extern void *PyBool_FromLong(long value);
extern void *PyLong_FromLong(long value);
extern void Py_DecRef(void *object);

struct torch {
    int32_t (*address)(const void *tensor, void **found);
    int32_t (*num_dims)(const void *tensor, int64_t *found);
    int32_t (*sizes)(const void *tensor, int64_t **found);
    int32_t (*strides)(const void *tensor, int64_t **found);
    int32_t (*facts[3])(const void *tensor, int32_t *found); /* dtype, kind of device, number of device */
    void *list, *tuple; /* their classes */
    int64_t type_at, count_at, list_at, tuple_at; /* of any object, of either, of the first item's: list_at has a pointer to it */
    int64_t flag_at, tensor_at; /* of a tensor's object; flag_at: a byte that is zero where its tensor is its own; negative: none */
    int64_t storage_at, offset_at, data_at, bytes_at; /* of a tensor, of a tensor, of a storage, of a storage */
};

/* an argument as it was; num_dims: how many sizes and strides follow in `lie`, sizes first; negative: it may lie, and be, what it likes */
struct argument {
    int64_t number;
    void *type;
    int64_t num_dims;
    const int64_t *lie;
    int32_t facts[3];
};

/* where an argument was; data: of its storage, null where that is not enough to know; offset: in its storage. Of one that fills its
 * storage, -1 - the storage's bytes: one of its sizes and strides lies nowhere else in as many, and its offset, which is further off in
 * memory, need not be looked at. There are hundreds: it is small. */
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

struct words {
    const struct word *each;
    int64_t count;
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

struct feeds {
    const struct feed *each;
    int64_t count;
};

/* the stream that the last replay was launched on; current: torch's, null where there are no streams; is_capturing: the driver's */
struct stream {
    int32_t (*current)(int32_t device, void **found);
    int32_t (*is_capturing)(void *stream, int32_t *found);
    int64_t device;
    const int64_t *last;
};

/* all that a call looks at; words: null where outputs are borrowed; feeds: null where inputs are copied otherwise */
struct ready {
    const struct stream *stream;
    const struct words *words;
    const struct fit *fit;
    const struct feeds *feeds;
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
    if (type != torch->tuple && type != torch->list) return 0;
    if (number >= *(const int64_t *)(args + torch->count_at)) return 0;
    if (type == torch->tuple) return ((char *const *)(args + torch->tuple_at))[number];
    return (*(char *const *const *)(args + torch->list_at))[number];
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
        if (places[i].offset >= 0) __builtin_prefetch(tensors[i] + torch->offset_at);
    }
    for (int64_t i = 0; i < count; i++) {
        storages[i] = *(char **)(tensors[i] + torch->storage_at);
        __builtin_prefetch(storages[i] + torch->data_at);
    }
    for (int64_t i = 0; i < count; i++) {
        const struct place *place = &places[i];
        int is_same = place->data && storages[i] && *(void **)(storages[i] + torch->data_at) == place->data &&
                      (place->offset >= 0 ? *(int64_t *)(tensors[i] + torch->offset_at) == place->offset
                                          : *(int64_t *)(storages[i] + torch->bytes_at) == -1 - place->offset);
        if (!is_same && (torch->address(objects[i] + torch->tensor_at, &found) || found != fit->addresses[first + i])) return 0;
    }
    return 1;
}

/* whether all arguments are where a recording may take them to be */
static int fits(const struct fit *fit, const void *args) {
    char *found;
    for (int64_t i = 0; i < fit->num_copied; i++) {
        if (find(fit->torch, args, &fit->copied[i], (void **)&found)) return 0;
        for (int64_t j = 0; j < fit->num_changed; j++)
            if (fit->changed[j].begin <= found && found < fit->changed[j].end) return 0;
    }
    for (int64_t i = 0; i < fit->num_bound; i += CHUNK)
        if (!are_there(fit, args, i, fit->num_bound - i < CHUNK ? fit->num_bound - i : CHUNK)) return 0;
    return 1;
}

/* whether every word is what it was */
static int hold(const struct words *words) {
    for (int64_t i = 0; i < words->count; i++)
        if (*words->each[i].at != words->each[i].value) return 0;
    return 1;
}

/* The recording's copies read from these arguments from now on. Returns how many do: the next one lies otherwise, or was refused. */
int64_t feed(void *args, const struct feeds *feeds, int64_t first) {
    for (int64_t i = first; i < feeds->count; i++) {
        const struct feed *each = &feeds->each[i];
        void *found;
        if (find(each->torch, args, &each->argument, &found) || (uint64_t)found % each->alignment) return i;
        *each->source = (uint64_t)found;
        if (each->set(each->graph, each->node, each->params)) return i;
    }
    return feeds->count;
}

/* whether the current stream is the last one again, and nobody captures it */
static int is_last(const struct stream *stream) {
    void *now;
    int32_t status;
    if (!stream->current) return 1;
    if (stream->current((int32_t)stream->device, &now) || (int64_t)now != *stream->last) return 0;
    return !stream->is_capturing(now, &status) && !status;
}

/* Whether a recording can be launched for these arguments as it was the last time: 0 for no, 1 where its inputs are still to be copied, 2
 * where its own copies read from these arguments. */
static int look(const struct ready *ready, void *args) {
    if (!is_last(ready->stream) || (ready->words && !hold(ready->words)) || !fits(ready->fit, args)) return 0;
    return ready->feeds && feed(args, ready->feeds, 0) == ready->feeds->count ? 2 : 1;
}

/* The same as functions that Python calls as its own, over facts that stay where they are: ctypes would take longer to call them than they
 * take. */

static void *call_fits(void *self, void *args) { return PyBool_FromLong(fits(PyCapsule_GetPointer(self, 0), args)); }
static void *call_hold(void *self, void *none) { return PyBool_FromLong(hold(PyCapsule_GetPointer(self, 0))); }
static void *call_feed(void *self, void *args) { return PyLong_FromLong(feed(args, PyCapsule_GetPointer(self, 0), 0)); }
static void *call_look(void *self, void *args) { return PyLong_FromLong(look(PyCapsule_GetPointer(self, 0), args)); }

static struct method methods[] = {
    {"fits", call_fits, ONE_ARG, 0},
    {"hold", call_hold, NO_ARGS, 0},
    {"feed", call_feed, ONE_ARG, 0},
    {"look", call_look, ONE_ARG, 0},
};

void *method_over(int64_t number, void *facts) {
    void *self = PyCapsule_New(facts, 0, 0);
    void *made = self ? PyCFunction_NewEx(&methods[number], self, 0) : 0;
    if (self) Py_DecRef(self);
    return made;
}
