/* Every entry of the shim from many threads at once, for the address and thread sanitizers.
 * usage: hammer FAKE_LIBCUDA; exits 0 when the books balance. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

int gracetune_shim_open(const char *, int, uint64_t, char *, size_t);
int gracetune_shim_close(int);
int gracetune_shim_set_cap(int, uint64_t);
int gracetune_shim_counters(int, uint64_t *, int);
void *gracetune_alloc_0(ssize_t, int, void *);
void gracetune_free_0(void *, size_t, int, void *);

enum { THREADS = 8, ROUNDS = 400, HELD = 8, KINDS = 15, CAP = 1 << 18 };
enum { LIVE, SEGMENTS, PEAK, CAP_BYTES, ALLOCATIONS, FREES, DENIED };
static const char *fake;
static uint64_t refused;

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

static void *allocate_and_free(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    void *held[HELD] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        int at = rand_r(&seed) % HELD;
        if (held[at] != NULL) {
            gracetune_free_0(held[at], 1, 0, NULL);
            held[at] = NULL;
            continue;
        }
        ssize_t nbytes = 1 + rand_r(&seed) % 65536;
        held[at] = gracetune_alloc_0(nbytes, (int)seed % 2 != 0, (void *)7);
        if (held[at] != NULL)
            memset(held[at], 1, (size_t)nbytes);
        else
            __atomic_add_fetch(&refused, 1, __ATOMIC_SEQ_CST);
    }
    for (int at = 0; at < HELD; at++)
        if (held[at] != NULL) gracetune_free_0(held[at], 1, 0, NULL);
    return NULL;
}

static void *watch_and_open_others(void *argument) {
    (void)argument;
    uint64_t counters[KINDS];
    char error[256];
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(gracetune_shim_counters(0, counters, KINDS) == KINDS);
        CHECK(counters[LIVE] <= CAP && counters[PEAK] <= CAP);
        CHECK(counters[ALLOCATIONS] - counters[FREES] == counters[SEGMENTS]);
        int slot = gracetune_shim_open(fake, round % 3, CAP, error, sizeof error);
        CHECK(slot > 0);
        CHECK(gracetune_shim_set_cap(slot, 1) == 0);
        CHECK(gracetune_shim_close(slot) == 0);
    }
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    fake = argv[1];
    char error[256];
    uint64_t counters[KINDS];
    CHECK(gracetune_shim_open(fake, 0, CAP, error, sizeof error) == 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL,
                       i < THREADS - 2 ? allocate_and_free : watch_and_open_others,
                       (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    CHECK(gracetune_shim_counters(0, counters, KINDS) == KINDS);
    CHECK(counters[LIVE] == 0 && counters[SEGMENTS] == 0);
    CHECK(counters[DENIED] == refused && refused > 0);
    CHECK(counters[PEAK] <= CAP && counters[PEAK] > CAP / 2);
    CHECK(gracetune_shim_close(0) == 0);
    void *handle = dlopen(fake, RTLD_NOW);
    uint64_t (*live)(void) = (uint64_t (*)(void))dlsym(handle, "fake_live");
    CHECK(live() == 0);
    printf("%llu allocations, %llu refused\n", (unsigned long long)counters[ALLOCATIONS],
           (unsigned long long)refused);
    return 0;
}
