/* Managed memory for torch's caching allocator.
 *
 * A torch MemPool allocates and frees its segments through two C functions. The functions here
 * allocate managed memory from the CUDA driver, advise where it should live, count it, and return
 * NULL beyond a cap, which torch turns into an OutOfMemoryError. torch passes no user data, so each
 * pool owns a slot, and each slot has its own pair of functions. No CUDA header is needed: libcuda
 * is opened at run time, and the part of its ABI that is used is declared here.
 *
 * torch calls these functions on any thread, with its allocator lock held. They must never call
 * back into Python.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
#define ABI 1
#define SLOTS 16
#define DEVICES 64

/* The part of the driver's ABI that is used; the same in CUDA 12 and 13. */
typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUcontext;
typedef void *CUstream;
typedef struct {
    int type; /* 1 device, 2 host */
    int id;
} CUmemLocation;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_DEINITIALIZED = 4 };
enum { AT_DEVICE = 1, AT_HOST = 2, CPU_DEVICE = -1 };
enum { SET_PREFERRED_LOCATION = 3, SET_ACCESSED_BY = 5 };
enum { ATTACH_GLOBAL = 1 };

enum { GPU_FIRST = 0, BALANCED = 1, CPU_FIRST = 2 };

/* Negative results of `open` and `close`. */
enum { NO_DRIVER = -1, NO_SYMBOL = -2, NO_INIT = -3, NO_SLOT = -4, BAD_ARGUMENT = -5, BUSY = -6 };

typedef struct {
    void *handle;
    CUresult (*init)(unsigned);
    CUresult (*alloc)(CUdeviceptr *, size_t, unsigned);
    CUresult (*free)(CUdeviceptr);
    CUresult (*device_get)(CUdevice *, int);
    CUresult (*ctx_current)(CUcontext *);
    CUresult (*ctx_device)(CUdevice *);
    CUresult (*ctx_push)(CUcontext);
    CUresult (*ctx_pop)(CUcontext *);
    CUresult (*ctx_retain)(CUcontext *, CUdevice);
    CUresult (*ctx_release)(CUdevice);
    /* One function of each pair is set: locations are structs since CUDA 12.2, integers before. */
    CUresult (*advise)(CUdeviceptr, size_t, int, CUmemLocation);
    CUresult (*advise_v1)(CUdeviceptr, size_t, int, CUdevice);
    CUresult (*prefetch)(CUdeviceptr, size_t, CUmemLocation, unsigned, CUstream);
    CUresult (*prefetch_v1)(CUdeviceptr, size_t, CUdevice, CUstream);
} Driver;

typedef struct Segment {
    CUdeviceptr pointer;
    uint64_t nbytes;
    struct Segment *next;
} Segment;

/* Python reads this struct as an array of 64-bit integers: only append fields, and raise ABI. */
typedef struct {
    uint64_t live_bytes, live_segments, peak_bytes, cap_bytes;
    uint64_t allocations, frees;
    uint64_t denied, denied_bytes;      /* refused because of the cap */
    uint64_t failed;                    /* refused by the driver */
    uint64_t hints, failed_hints;       /* advice calls and prefetches */
    uint64_t failed_frees, leaked_bytes; /* the driver failed to free */
    uint64_t foreign_frees;             /* pointers of other allocators */
    uint64_t last_code;                 /* the driver's last error code */
} Counters;

typedef struct {
    pthread_mutex_t lock;
    int used;
    int closing; /* released with its last segment */
    int pattern;
    Driver driver;
    Segment *segments;
    Counters counters;
    CUcontext primary[DEVICES];
} Slot;

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static Slot slots[SLOTS] = {[0 ... SLOTS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

static int find(Driver *driver, void **target, const char *name, char *error, size_t error_size) {
    *target = dlsym(driver->handle, name);
    if (*target != NULL) return 0;
    if (error != NULL) snprintf(error, error_size, "the driver library has no %s", name);
    return NO_SYMBOL;
}

static int load(Driver *driver, const char *path, char *error, size_t error_size) {
    memset(driver, 0, sizeof *driver);
    driver->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (driver->handle == NULL) {
        const char *reason = dlerror();
        snprintf(error, error_size, "%s", reason != NULL ? reason : "cannot be opened");
        return NO_DRIVER;
    }
    struct {
        void **target;
        const char *name;
    } needed[] = {
        {(void **)&driver->init, "cuInit"},
        {(void **)&driver->alloc, "cuMemAllocManaged"},
        {(void **)&driver->free, "cuMemFree_v2"},
        {(void **)&driver->device_get, "cuDeviceGet"},
        {(void **)&driver->ctx_current, "cuCtxGetCurrent"},
        {(void **)&driver->ctx_device, "cuCtxGetDevice"},
        {(void **)&driver->ctx_push, "cuCtxPushCurrent_v2"},
        {(void **)&driver->ctx_pop, "cuCtxPopCurrent_v2"},
        {(void **)&driver->ctx_retain, "cuDevicePrimaryCtxRetain"},
        {(void **)&driver->ctx_release, "cuDevicePrimaryCtxRelease_v2"},
    };
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
        int code = find(driver, needed[i].target, needed[i].name, error, error_size);
        if (code != 0) return code;
    }
    if (find(driver, (void **)&driver->advise, "cuMemAdvise_v2", NULL, 0) != 0) {
        int code = find(driver, (void **)&driver->advise_v1, "cuMemAdvise", error, error_size);
        if (code != 0) return code;
    }
    if (find(driver, (void **)&driver->prefetch, "cuMemPrefetchAsync_v2", NULL, 0) != 0) {
        int code =
            find(driver, (void **)&driver->prefetch_v1, "cuMemPrefetchAsync", error, error_size);
        if (code != 0) return code;
    }
    CUresult code = driver->init(0);
    if (code == CUDA_SUCCESS) return 0;
    snprintf(error, error_size, "cuInit returned %d", code);
    return NO_INIT;
}

EXPORT int gracetune_shim_abi(void) { return ABI; }

/* Reserve a slot. Returns its number, or a negative code with a reason in `error`. */
EXPORT int gracetune_shim_open(const char *libcuda, int pattern, uint64_t cap_bytes, char *error,
                               size_t error_size) {
    if (libcuda == NULL || error == NULL || error_size == 0) return BAD_ARGUMENT;
    error[0] = '\0';
    if (pattern < GPU_FIRST || pattern > CPU_FIRST) {
        snprintf(error, error_size, "access pattern %d is none of 0, 1, 2", pattern);
        return BAD_ARGUMENT;
    }
    Driver driver;
    int code = load(&driver, libcuda, error, error_size);
    if (code != 0) {
        if (driver.handle != NULL) dlclose(driver.handle);
        return code;
    }
    pthread_mutex_lock(&table_lock);
    for (int number = 0; number < SLOTS; number++) {
        Slot *slot = &slots[number];
        pthread_mutex_lock(&slot->lock);
        if (slot->used) {
            pthread_mutex_unlock(&slot->lock);
            continue;
        }
        slot->used = 1;
        slot->closing = 0;
        slot->pattern = pattern;
        slot->driver = driver;
        slot->segments = NULL;
        memset(&slot->counters, 0, sizeof slot->counters);
        memset(slot->primary, 0, sizeof slot->primary);
        slot->counters.cap_bytes = cap_bytes;
        pthread_mutex_unlock(&slot->lock);
        pthread_mutex_unlock(&table_lock);
        return number;
    }
    pthread_mutex_unlock(&table_lock);
    dlclose(driver.handle);
    snprintf(error, error_size, "all %d pools are open", SLOTS);
    return NO_SLOT;
}

/* Lock a slot that is in use; returns NULL for any other number. */
static Slot *enter(int number) {
    if (number < 0 || number >= SLOTS) return NULL;
    Slot *slot = &slots[number];
    pthread_mutex_lock(&slot->lock);
    if (slot->used) return slot;
    pthread_mutex_unlock(&slot->lock);
    return NULL;
}

/* Let another pool use the slot. The caller has locked it. */
static void release_slot(Slot *slot) {
    for (int ordinal = 0; ordinal < DEVICES; ordinal++) {
        CUdevice device;
        if (slot->primary[ordinal] != NULL && slot->driver.device_get(&device, ordinal) == 0)
            slot->driver.ctx_release(device);
    }
    dlclose(slot->driver.handle);
    slot->used = 0;
}

/* Release a slot, whose number the caller must not use any more. Returns BUSY if torch holds
   segments of it; it is then released with the last one, unless one cannot be freed. */
EXPORT int gracetune_shim_close(int number) {
    Slot *slot = enter(number);
    if (slot == NULL) return BAD_ARGUMENT;
    slot->closing = 1;
    int is_busy = slot->counters.live_segments != 0;
    if (!is_busy) release_slot(slot);
    pthread_mutex_unlock(&slot->lock);
    return is_busy ? BUSY : 0;
}

EXPORT int gracetune_shim_set_cap(int number, uint64_t cap_bytes) {
    Slot *slot = enter(number);
    if (slot == NULL) return BAD_ARGUMENT;
    slot->counters.cap_bytes = cap_bytes;
    pthread_mutex_unlock(&slot->lock);
    return 0;
}

/* Copy up to `count` counters. Returns how many exist, or BAD_ARGUMENT. */
EXPORT int gracetune_shim_counters(int number, uint64_t *target, int count) {
    const int known = (int)(sizeof(Counters) / sizeof(uint64_t));
    Slot *slot = enter(number);
    if (slot == NULL) return BAD_ARGUMENT;
    memcpy(target, &slot->counters, sizeof(uint64_t) * (size_t)(count < known ? count : known));
    pthread_mutex_unlock(&slot->lock);
    return known;
}

/* Make a device's primary context current if it is not yet. Sets `pushed` to 1 if the caller must
   call pop_device afterwards. */
static CUresult push_device(Slot *slot, int ordinal, int *pushed) {
    Driver *driver = &slot->driver;
    CUcontext current = NULL;
    CUdevice wanted = 0, at = 0;
    *pushed = 0;
    if (ordinal < 0 || ordinal >= DEVICES) return CUDA_ERROR_INVALID_VALUE;
    CUresult code = driver->device_get(&wanted, ordinal);
    if (code != CUDA_SUCCESS) return code;
    code = driver->ctx_current(&current);
    if (code != CUDA_SUCCESS) return code;
    if (current != NULL && driver->ctx_device(&at) == CUDA_SUCCESS && at == wanted) return code;
    if (slot->primary[ordinal] == NULL) {
        code = driver->ctx_retain(&slot->primary[ordinal], wanted);
        if (code != CUDA_SUCCESS) return code;
    }
    code = driver->ctx_push(slot->primary[ordinal]);
    *pushed = code == CUDA_SUCCESS;
    return code;
}

static void pop_device(Slot *slot, int pushed) {
    CUcontext popped;
    if (pushed) slot->driver.ctx_pop(&popped);
}

static void hint(Slot *slot, CUresult code) {
    slot->counters.hints++;
    if (code == CUDA_SUCCESS) return;
    slot->counters.failed_hints++;
    slot->counters.last_code = (uint64_t)code;
}

static void advise(Slot *slot, CUdeviceptr pointer, size_t nbytes, int advice, int type, int id) {
    CUmemLocation place = {type, id};
    hint(slot, slot->driver.advise != NULL
                   ? slot->driver.advise(pointer, nbytes, advice, place)
                   : slot->driver.advise_v1(pointer, nbytes, advice,
                                            type == AT_HOST ? CPU_DEVICE : id));
}

/* Advise and prefetch a new segment. A failed hint costs only speed, so it is just counted. */
static void settle(Slot *slot, CUdeviceptr pointer, size_t nbytes, int device, CUstream stream) {
    if (slot->pattern == GPU_FIRST)
        advise(slot, pointer, nbytes, SET_PREFERRED_LOCATION, AT_DEVICE, device);
    if (slot->pattern == CPU_FIRST)
        advise(slot, pointer, nbytes, SET_PREFERRED_LOCATION, AT_HOST, 0);
    advise(slot, pointer, nbytes, SET_ACCESSED_BY, AT_DEVICE, device);
    if (slot->pattern != GPU_FIRST) return;
    CUmemLocation place = {AT_DEVICE, device};
    hint(slot, slot->driver.prefetch != NULL
                   ? slot->driver.prefetch(pointer, nbytes, place, 0, stream)
                   : slot->driver.prefetch_v1(pointer, nbytes, device, stream));
}

static void *fail(Slot *slot, CUresult code) {
    slot->counters.failed++;
    slot->counters.last_code = (uint64_t)code;
    return NULL;
}

/* Allocate a segment, or return NULL. The caller has locked the slot. It stays locked during the
   driver calls, which makes the cap exact; torch serializes the allocations of a device anyway. */
static void *allocate_locked(Slot *slot, size_t nbytes, int device, CUstream stream) {
    Counters *counters = &slot->counters;
    if (nbytes > counters->cap_bytes || counters->live_bytes > counters->cap_bytes - nbytes) {
        counters->denied++;
        counters->denied_bytes += nbytes;
        return NULL;
    }
    Segment *segment = malloc(sizeof *segment);
    if (segment == NULL) return NULL;
    int pushed;
    CUdeviceptr pointer = 0;
    CUresult code = push_device(slot, device, &pushed);
    if (code == CUDA_SUCCESS) code = slot->driver.alloc(&pointer, nbytes, ATTACH_GLOBAL);
    if (code == CUDA_SUCCESS) settle(slot, pointer, nbytes, device, stream);
    pop_device(slot, pushed);
    if (code != CUDA_SUCCESS) {
        free(segment);
        return fail(slot, code);
    }
    *segment = (Segment){pointer, nbytes, slot->segments};
    slot->segments = segment;
    counters->allocations++;
    counters->live_segments++;
    counters->live_bytes += nbytes;
    if (counters->live_bytes > counters->peak_bytes) counters->peak_bytes = counters->live_bytes;
    return (void *)(uintptr_t)pointer;
}

static void *allocate(int number, ssize_t nbytes, int device, CUstream stream) {
    Slot *slot = enter(number);
    if (slot == NULL) return NULL;
    void *pointer = nbytes > 0 ? allocate_locked(slot, (size_t)nbytes, device, stream)
                               : fail(slot, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_unlock(&slot->lock);
    return pointer;
}

static void release(int number, void *pointer, int device) {
    Slot *slot = enter(number);
    if (slot == NULL || pointer == NULL) {
        if (slot != NULL) pthread_mutex_unlock(&slot->lock);
        return;
    }
    Counters *counters = &slot->counters;
    Segment **link = &slot->segments;
    while (*link != NULL && (*link)->pointer != (CUdeviceptr)(uintptr_t)pointer)
        link = &(*link)->next;
    Segment *segment = *link;
    if (segment == NULL) {
        counters->foreign_frees++;
        pthread_mutex_unlock(&slot->lock);
        return;
    }
    int pushed;
    CUresult code = push_device(slot, device, &pushed);
    if (code == CUDA_SUCCESS) code = slot->driver.free(segment->pointer);
    pop_device(slot, pushed);
    counters->frees++;
    /* At exit the driver may be gone already, and all its memory with it. */
    if (code != CUDA_SUCCESS && code != CUDA_ERROR_DEINITIALIZED) {
        counters->failed_frees++;
        counters->leaked_bytes += segment->nbytes;
        counters->last_code = (uint64_t)code;
    } else {
        counters->live_segments--;
        counters->live_bytes -= segment->nbytes;
    }
    *link = segment->next;
    free(segment);
    if (slot->closing && counters->live_segments == 0) release_slot(slot);
    pthread_mutex_unlock(&slot->lock);
}

/* The functions that torch calls: `gracetune_alloc_N` and `gracetune_free_N` for slot N. */
#define PAIR(N)                                                                            \
    EXPORT void *gracetune_alloc_##N(ssize_t nbytes, int device, CUstream stream) {        \
        return allocate(N, nbytes, device, stream);                                        \
    }                                                                                      \
    EXPORT void gracetune_free_##N(void *pointer, size_t nbytes, int device, CUstream stream) { \
        (void)nbytes, (void)stream;                                                        \
        release(N, pointer, device);                                                       \
    }

PAIR(0) PAIR(1) PAIR(2) PAIR(3) PAIR(4) PAIR(5) PAIR(6) PAIR(7)
PAIR(8) PAIR(9) PAIR(10) PAIR(11) PAIR(12) PAIR(13) PAIR(14) PAIR(15)
