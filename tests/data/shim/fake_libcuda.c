/* A libcuda for tests: real host memory behind the calls the shim and cuda-bindings make, a log of
 * what arrived, and failures on request. Compile with -DOLD for a driver that takes integers for
 * places, -DOMIT_<NAME> to leave a symbol out. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct {
    int type, id;
} CUmemLocation;

enum { LOG_BYTES = 1 << 16, NAMES = 16, CONTEXTS = 8, RANGES = 256 };
enum { NO_PLACE = -2 };

typedef struct {
    CUdeviceptr pointer;
    size_t nbytes;
    int pinned, preferred, fetched, read_mostly, accessed[4];
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char calls[LOG_BYTES];
static struct {
    char name[64];
    CUresult code;
} failures[NAMES];
static int retained[CONTEXTS];
static uint64_t live;
static Range ranges[RANGES];
static __thread void *stack[16];
static __thread int depth;

#define EXPORT __attribute__((visibility("default")))

/* What tests steer it with. */
EXPORT void fake_fail(const char *name, CUresult code) {
    for (int i = 0; i < NAMES; i++)
        if (failures[i].name[0] == '\0' || strcmp(failures[i].name, name) == 0) {
            snprintf(failures[i].name, sizeof failures[i].name, "%s", name);
            failures[i].code = code;
            return;
        }
    abort();
}
EXPORT const char *fake_calls(void) { return calls; }
EXPORT uint64_t fake_live(void) { return __atomic_load_n(&live, __ATOMIC_SEQ_CST); }
EXPORT int fake_retained(int device) { return retained[device]; }
EXPORT int fake_depth(void) { return depth; }
EXPORT void fake_set_current(int device) {
    depth = 0;
    if (device >= 0) stack[depth++] = (void *)(uintptr_t)(device + 1);
}

static CUresult failing(const char *name) {
    for (int i = 0; i < NAMES && failures[i].name[0] != '\0'; i++)
        if (strcmp(failures[i].name, name) == 0) return failures[i].code;
    return 0;
}

static size_t written;

#define LOGGED(name, ...)                                                          \
    do {                                                                           \
        pthread_mutex_lock(&lock);                                                 \
        if (written < LOG_BYTES - 128)                                             \
            written += (size_t)snprintf(calls + written, 128, __VA_ARGS__);        \
        pthread_mutex_unlock(&lock);                                               \
        if (failing(name) != 0) return failing(name);                              \
    } while (0)

static Range *find(CUdeviceptr pointer) {
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].pointer != 0 && pointer >= ranges[i].pointer &&
            pointer < ranges[i].pointer + ranges[i].nbytes)
            return &ranges[i];
    return NULL;
}

static void remember(CUdeviceptr pointer, size_t nbytes, int pinned) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].pointer == 0) {
            ranges[i] = (Range){pointer, nbytes, pinned, NO_PLACE, NO_PLACE, 0,
                                {NO_PLACE, NO_PLACE, NO_PLACE, NO_PLACE}};
            break;
        }
    pthread_mutex_unlock(&lock);
    __atomic_add_fetch(&live, nbytes, __ATOMIC_SEQ_CST);
}

static CUresult forget(CUdeviceptr pointer) {
    pthread_mutex_lock(&lock);
    Range *found = find(pointer);
    if (found == NULL || found->pointer != pointer) {
        pthread_mutex_unlock(&lock);
        return 1;
    }
    size_t nbytes = found->nbytes;
    found->pointer = 0;
    pthread_mutex_unlock(&lock);
    __atomic_sub_fetch(&live, nbytes, __ATOMIC_SEQ_CST);
    free((void *)(uintptr_t)pointer);
    return 0;
}

static CUresult take(CUdeviceptr *pointer, size_t nbytes, int pinned) {
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, nbytes) != 0) return 2;
    *pointer = (CUdeviceptr)(uintptr_t)memory;
    remember(*pointer, nbytes, pinned);
    return 0;
}

__attribute__((unused)) static CUresult advised(CUdeviceptr pointer, int advice, int place) {
    pthread_mutex_lock(&lock);
    Range *found = find(pointer);
    if (found != NULL && !found->pinned) {
        if (advice == 1 || advice == 2) found->read_mostly = advice == 1;
        if (advice == 3 || advice == 4) found->preferred = advice == 3 ? place : NO_PLACE;
        if (advice == 5 || advice == 6) found->accessed[place + 1] = advice == 5 ? place : NO_PLACE;
    }
    pthread_mutex_unlock(&lock);
    return found != NULL && !found->pinned ? 0 : 1;
}

static CUresult fetched(CUdeviceptr pointer, int place) {
    pthread_mutex_lock(&lock);
    Range *found = find(pointer);
    if (found != NULL && !found->pinned) found->fetched = place;
    pthread_mutex_unlock(&lock);
    return found != NULL && !found->pinned ? 0 : 1;
}

EXPORT void fake_forget(void) {
    written = 0;
    calls[0] = '\0';
}

EXPORT CUresult cuInit(unsigned flags) {
    (void)flags;
    return failing("cuInit");
}
EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
EXPORT CUresult cuDeviceGetCount(int *count) {
    *count = failing("devices") != 0 ? failing("devices") - 1 : 2;
    return 0;
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal > 1) return 101;
    *device = ordinal;
    return failing("cuDeviceGet");
}
EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    *value = attribute + 1000 * device;
    return failing("cuDeviceGetAttribute");
}
EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return code == 2 ? 0 : 1;
}
EXPORT CUresult cuCtxGetCurrent(void **context) {
    *context = depth > 0 ? stack[depth - 1] : NULL;
    return failing("cuCtxGetCurrent");
}
EXPORT CUresult cuCtxSetCurrent(void *context) {
    if (depth == 0) depth = 1;
    stack[depth - 1] = context;
    return 0;
}
EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    if (depth == 0) return 201;
    *device = (int)(uintptr_t)stack[depth - 1] - 1;
    return 0;
}
EXPORT CUresult cuCtxPushCurrent_v2(void *context) {
    if (failing("cuCtxPushCurrent_v2") != 0) return failing("cuCtxPushCurrent_v2");
    stack[depth++] = context;
    return 0;
}
EXPORT CUresult cuCtxPopCurrent_v2(void **context) {
    if (depth == 0) return 201;
    *context = stack[--depth];
    return 0;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device) {
    if (failing("cuDevicePrimaryCtxRetain") != 0) return failing("cuDevicePrimaryCtxRetain");
    *context = (void *)(uintptr_t)(device + 1);
    __atomic_add_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
    return 0;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    __atomic_sub_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
    return 0;
}
EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *free_bytes = 60, *total = 100 + (depth > 0 ? (size_t)(uintptr_t)stack[depth - 1] : 0);
    return failing("cuMemGetInfo_v2");
}
#ifndef OMIT_ALLOC
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t nbytes, unsigned flags) {
    LOGGED("cuMemAllocManaged", "alloc %zu %u\n", nbytes, flags);
    if (depth == 0) return 201;
    return take(pointer, nbytes, 0);
}
#endif
EXPORT CUresult cuMemHostAlloc(void **pointer, size_t nbytes, unsigned flags) {
    LOGGED("cuMemHostAlloc", "pin %zu %u\n", nbytes, flags);
    CUdeviceptr taken = 0;
    CUresult code = take(&taken, nbytes, 1);
    *pointer = (void *)(uintptr_t)taken;
    return code;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
    LOGGED("cuMemFree_v2", "free\n");
    if (depth == 0) return 201;
    return forget(pointer);
}
EXPORT CUresult cuMemFreeHost(void *pointer) {
    LOGGED("cuMemFreeHost", "unpin\n");
    return forget((CUdeviceptr)(uintptr_t)pointer);
}
EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer) {
    pthread_mutex_lock(&lock);
    Range *found = find(pointer);
    int pinned = found != NULL && found->pinned;
    pthread_mutex_unlock(&lock);
    if (found == NULL) return 1;
    if (attribute == 8) *(unsigned char *)data = !pinned; /* IS_MANAGED */
    if (attribute == 2) *(unsigned *)data = pinned ? 1 : 2; /* MEMORY_TYPE */
    return 0;
}
EXPORT CUresult cuMemRangeGetAttribute(void *data, size_t size, int attribute, CUdeviceptr pointer,
                                       size_t nbytes) {
    (void)nbytes;
    pthread_mutex_lock(&lock);
    Range *found = find(pointer);
    Range copy = found != NULL ? *found : (Range){0};
    pthread_mutex_unlock(&lock);
    if (found == NULL || copy.pinned) return 1;
    if (attribute == 1) *(int *)data = copy.read_mostly;
    if (attribute == 2) *(int *)data = copy.preferred;
    if (attribute == 3) memcpy(data, copy.accessed, size);
    if (attribute == 4) *(int *)data = copy.fetched;
    return 0;
}
#if defined OLD
EXPORT CUresult cuMemAdvise(CUdeviceptr pointer, size_t nbytes, int advice, CUdevice place) {
    LOGGED("cuMemAdvise", "advise_v1 %zu %d %d\n", nbytes, advice, place);
    return advised(pointer, advice, place);
}
EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr pointer, size_t nbytes, CUdevice place, void *stream) {
    LOGGED("cuMemPrefetchAsync", "prefetch_v1 %zu %d %zu\n", nbytes, place, (size_t)stream);
    return fetched(pointer, place);
}
#else
#ifndef OMIT_ADVISE
EXPORT CUresult cuMemAdvise_v2(CUdeviceptr pointer, size_t nbytes, int advice, CUmemLocation at) {
    LOGGED("cuMemAdvise_v2", "advise %zu %d %d:%d\n", nbytes, advice, at.type, at.id);
    return advised(pointer, advice, at.type == 2 ? -1 : at.id);
}
#endif
EXPORT CUresult cuMemPrefetchAsync_v2(CUdeviceptr pointer, size_t nbytes, CUmemLocation at,
                                      unsigned flags, void *stream) {
    LOGGED("cuMemPrefetchAsync_v2", "prefetch %zu %d:%d %u %zu\n", nbytes, at.type, at.id, flags,
           (size_t)stream);
    return fetched(pointer, at.type == 2 ? -1 : at.id);
}
#ifndef OMIT_DISCARD
EXPORT CUresult cuMemDiscardBatchAsync(CUdeviceptr *pointers, size_t *sizes, size_t count,
                                       unsigned long long flags, void *stream) {
    LOGGED("cuMemDiscardBatchAsync", "discard %zu %zu %llu %zu\n", count, sizes[0], flags,
           (size_t)stream);
    return stream == NULL || find(pointers[0]) == NULL ? 1 : 0;
}
#endif
#endif

/* How cuda-bindings finds every other function; names without a version mean the newest. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version,
                                    uint64_t flags, int *status) {
    (void)version, (void)flags;
    char newest[128];
    Dl_info info;
    dladdr((void *)cuInit, &info);
    void *self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = NULL;
    for (int number = 2; number > 0 && *function == NULL; number--) {
        snprintf(newest, sizeof newest, number > 1 ? "%s_v%d" : "%s", name, number);
        *function = dlsym(self, newest);
    }
    dlclose(self);
    if (status != NULL) *status = *function != NULL ? 0 : 1;
    return 0;
}
EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
