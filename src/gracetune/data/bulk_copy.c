/* Stat many files, copy many files, or concatenate many buffers, in one call from Python.
 *
 * Staging and the caches do this all the time. Copying a file of 100 KB takes about 20
 * microseconds. In Python, each copy would release and take the GIL three times; ctypes releases it
 * once for the whole call.
 *
 * Files are copied with splice(): from the page cache to a pipe, which only holds references to the
 * pages, and from the pipe to the target in pieces of 512 KiB. The bytes are copied once, and few
 * pages of the target are written in two parts.
 *
 * A file that changed or cannot be copied is reported as FAILED, and Python handles it.
 */
#define _GNU_SOURCE
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define ABI 2
#define PIPE_NBYTES (512 * 1024) /* size of a pipe; 72 of them stay below the limit per user */
#define PIPE_PAGES 16            /* smallest size of a pipe in pages, where pages are large */
#define LINE 64                  /* bytes in a cache line */
#define AHEAD 4096               /* distance in bytes of the software prefetch */
#define LARGE (64 * 1024)        /* buffers of at least this size are rarely in a CPU cache */

/* WHOLE: an offset that stands for the whole file. FAILED: the length of a file not copied. */
enum { WHOLE = -1, FAILED = -1 };

/* A pipe between the source files and the target file. */
typedef struct {
    int read_end, write_end, target; /* file descriptors */
    int64_t pending;                 /* bytes in the pipe */
} Channel;

/* Return the interface version, which must equal ABI in bulk_copy.py. */
EXPORT int gracetune_bulk_copy_abi(void) { return ABI; }

/* Create a pipe. Return 0 if that fails, for example because too many files are open. */
static int open_channel(Channel *channel, int target) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return 0;
    long page = sysconf(_SC_PAGESIZE);
    long nbytes = PIPE_PAGES * page > PIPE_NBYTES ? PIPE_PAGES * page : PIPE_NBYTES;
    (void)fcntl(ends[1], F_SETPIPE_SZ, (int)nbytes); /* may fail: a smaller pipe is only slower */
    *channel = (Channel){ends[0], ends[1], target, 0};
    return 1;
}

static void close_channel(Channel *channel) {
    close(channel->read_end);
    close(channel->write_end);
}

/* Write all bytes in the pipe to the target. Return 0, or the negative errno of a failed write. */
static int flush(Channel *channel) {
    while (channel->pending > 0) {
        ssize_t moved =
            splice(channel->read_end, NULL, channel->target, NULL, (size_t)channel->pending, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved < 0 ? -errno : -ENOSPC;
        channel->pending -= moved;
    }
    return 0;
}

/* Splice `nbytes` at `offset` of a file into the pipe, and flush the pipe whenever it is full.
 *
 * Return the number of bytes spliced. It is smaller than `nbytes` if the file has become shorter,
 * if reading failed (`*read_error` is the errno), or if writing failed (`*write_error` is the
 * negative errno).
 */
static int64_t splice_file(Channel *channel, int file, off64_t offset, int64_t nbytes,
                           int *read_error, int *write_error) {
    int64_t done = 0;
    while (done < nbytes) {
        ssize_t moved = splice(file, &offset, channel->write_end, NULL, (size_t)(nbytes - done),
                               SPLICE_F_NONBLOCK);
        if (moved > 0) {
            done += moved;
            channel->pending += moved;
        } else if (moved == 0) {
            break; /* the file has become shorter */
        } else if (errno == EAGAIN && channel->pending > 0) {
            *write_error = flush(channel);
            if (*write_error != 0) break;
        } else if (errno != EINTR) {
            *read_error = errno;
            break;
        }
    }
    return done;
}

/* Return 1 if an open file is regular and still has the length that was measured before. */
static int has_known_length(int file, int64_t offset, int64_t nbytes) {
    struct stat status;
    if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return 0;
    return offset == WHOLE ? status.st_size == nbytes : status.st_size >= offset + nbytes;
}

/* Store the length of each file in `sizes`; 0 if stat() fails. `paths` as in gracetune_bulk_copy. */
EXPORT void gracetune_sizes(const char *paths, int64_t count, int64_t *sizes) {
    for (int64_t row = 0; row < count; row++, paths += strlen(paths) + 1) {
        struct stat status;
        sizes[row] = stat(paths, &status) == 0 ? status.st_size : 0;
    }
}

/* Append `count` files, or ranges of files, to `target` at its current position.
 *
 * `paths`:   one path after another, each terminated by a NUL byte.
 * `offsets`: start of the range in each file, or WHOLE to copy the whole file.
 * `nbytes`:  in: the known length of each file or range. Out: the bytes copied, which are fewer if
 *            the file has become shorter since, or FAILED.
 * `starts`:  out: position of each file in the output, relative to the start of this call.
 *
 * Return the number of bytes written, or the negative errno if writing to `target` failed.
 */
EXPORT int64_t gracetune_bulk_copy(int target, const char *paths, int64_t count,
                                const int64_t *offsets, int64_t *nbytes, int64_t *starts) {
    Channel channel;
    int write_error = 0;
    int64_t total = 0;
    if (!open_channel(&channel, target)) {
        for (int64_t row = 0; row < count; row++) nbytes[row] = FAILED;
        return 0;
    }
    for (int64_t row = 0; row < count && write_error == 0; row++, paths += strlen(paths) + 1) {
        int read_error = 0, file = open(paths, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        starts[row] = total;
        if (file >= 0 && has_known_length(file, offsets[row], nbytes[row])) {
            off64_t from = offsets[row] == WHOLE ? 0 : offsets[row];
            int64_t copied =
                splice_file(&channel, file, from, nbytes[row], &read_error, &write_error);
            total += copied; /* also after a read error: these bytes are in the output, unused */
            nbytes[row] = read_error != 0 ? FAILED : copied;
        } else {
            nbytes[row] = FAILED;
        }
        if (file >= 0) close(file);
    }
    if (write_error == 0) write_error = flush(&channel);
    close_channel(&channel);
    return write_error != 0 ? write_error : total;
}

#if defined(__x86_64__)
#define OSXSAVE (1u << 27)  /* CPUID leaf 1, ecx: xgetbv exists */
#define AVX512F (1u << 16)  /* CPUID leaf 7, ebx */
#define ZMM_ENABLED 0xe6u   /* xgetbv 0: the kernel saves the SSE, AVX and AVX-512 registers */

static int has_avx512f;

/* Ask the CPU once, when the library is loaded: CPUID is slow in virtual machines. This replaces
 * __builtin_cpu_supports, which not every compiler's runtime library has.
 */
__attribute__((constructor)) static void detect_avx512f(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & OSXSAVE)) return;
    __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    if ((eax & ZMM_ENABLED) != ZMM_ENABLED) return;
    has_avx512f = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & AVX512F);
}

typedef int64_t Line __attribute__((vector_size(LINE), aligned(1), may_alias));

/* Copy a buffer to `target`, and prefetch the start of the `next` one.
 *
 * Stores fill whole cache lines, so that the old contents of the target need not be read first.
 * Four lines are copied at a time. They are prefetched one page (AHEAD) before they are copied,
 * because the CPU's own prefetcher stops at page boundaries.
 */
__attribute__((target("avx512f"))) static void copy_lines(char *target, const char *buffer,
                                                          const char *next, int64_t nbytes) {
    int64_t at = 0;
    for (; at + 4 * LINE <= nbytes; at += 4 * LINE) {
        int64_t ahead = at + AHEAD;
        const char *soon = ahead < nbytes ? buffer + ahead : next + (ahead - nbytes);
        for (int line = 0; line < 4; line++) __builtin_prefetch(soon + line * LINE, 0, 2);
        const Line *from = (const Line *)(buffer + at);
        Line first = from[0], second = from[1], third = from[2], fourth = from[3];
        Line *to = (Line *)(target + at);
        to[0] = first, to[1] = second, to[2] = third, to[3] = fourth;
    }
    memcpy(target + at, buffer + at, (size_t)(nbytes - at));
}
#endif

/* Copy `count` buffers of `nbytes` each to `target`, one after another. */
EXPORT void gracetune_join(char *target, const char *const *buffers, int64_t count,
                           int64_t nbytes) {
#if defined(__x86_64__)
    if (nbytes >= LARGE && has_avx512f) {
        for (int64_t row = 0; row < count; row++, target += nbytes)
            copy_lines(target, buffers[row], buffers[row + 1 < count ? row + 1 : row], nbytes);
        return;
    }
#endif
    for (int64_t row = 0; row < count; row++, target += nbytes)
        memcpy(target, buffers[row], (size_t)nbytes);
}
