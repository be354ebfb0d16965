/* Many files measured or copied, and many pieces of memory joined, in one call: what staging and the
 * caches do most, without Python in between.
 *
 * A file of a hundred kilobytes is copied in some twenty microseconds, and Python's lock changes
 * hands three times meanwhile. Here a worker holds it for none of them. Bytes go from the page cache
 * to a pipe, which only refers to them, and from there to the target in pieces of half a megabyte:
 * they are copied once, and few pages are written in two parts.
 *
 * Whatever is odd about a file is not judged here: its row says so, and Python looks at it again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define ABI 2
#define PIPE_NBYTES (512 * 1024) /* seventy-two of them are below what one user may have */
#define PIPE_PAGES 16            /* and at least so many, where pages are large */
#define LINE 64                  /* bytes that memory and caches exchange */
#define AHEAD 4096               /* bytes between a line that is asked for and one that is copied */
#define LARGE (64 * 1024)        /* pieces from this size on are hardly ever in a cache */

enum { WHOLE = -1, ODD = -1 };

typedef struct {
    int read_end, write_end, target;
    int64_t waiting; /* bytes that the pipe refers to */
} Channel;

EXPORT int gracetune_gather_abi(void) { return ABI; }

/* Whether there is one: a process may have as many descriptors as it may have. */
static int open_channel(Channel *channel, int target) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return 0;
    long page = sysconf(_SC_PAGESIZE);
    long nbytes = PIPE_PAGES * page > PIPE_NBYTES ? PIPE_PAGES * page : PIPE_NBYTES;
    (void)fcntl(ends[1], F_SETPIPE_SZ, (int)nbytes); /* a smaller one is slower, and right */
    *channel = (Channel){ends[0], ends[1], target, 0};
    return 1;
}

static void close_channel(Channel *channel) {
    close(channel->read_end);
    close(channel->write_end);
}

/* Copy what waits; 0, or the error of a target that takes no more. */
static int flush(Channel *channel) {
    while (channel->waiting > 0) {
        ssize_t moved =
            splice(channel->read_end, NULL, channel->target, NULL, (size_t)channel->waiting, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved < 0 ? -errno : -ENOSPC;
        channel->waiting -= moved;
    }
    return 0;
}

/* Bring `nbytes` from `offset`; how many came, with the reason in `odd` where it is not the end. */
static int64_t bring(Channel *channel, int file, off64_t offset, int64_t nbytes, int *odd,
                     int *full) {
    int64_t done = 0;
    while (done < nbytes) {
        ssize_t came = splice(file, &offset, channel->write_end, NULL, (size_t)(nbytes - done),
                              SPLICE_F_NONBLOCK);
        if (came > 0) {
            done += came;
            channel->waiting += came;
        } else if (came == 0) {
            break; /* it has become shorter */
        } else if (errno == EAGAIN && channel->waiting > 0) {
            *full = flush(channel);
            if (*full != 0) break;
        } else if (errno != EINTR) {
            *odd = errno;
            break;
        }
    }
    return done;
}

/* Whether a file still is what it was when it was sized. */
static int is_as_known(int file, int64_t offset, int64_t nbytes) {
    struct stat status;
    if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return 0;
    return offset == WHOLE ? status.st_size == nbytes : status.st_size >= offset + nbytes;
}

/* The length of each file before it is read; 0 for one that cannot be asked. */
EXPORT void gracetune_sizes(const char *paths, int64_t count, int64_t *sizes) {
    for (int64_t row = 0; row < count; row++, paths += strlen(paths) + 1) {
        struct stat status;
        sizes[row] = stat(paths, &status) == 0 ? status.st_size : 0;
    }
}

/* Copy `count` files behind each other to where `target` stands.
 *
 * `paths` are behind each other too, each with a NUL; an offset of WHOLE stands for all of a file.
 * `starts` tells where each file begins, counted from the first byte of this call, and `nbytes` how
 * long it is: as many bytes as were known before, fewer where it has shrunk since, or ODD.
 * Gives the number of bytes written, or the negative error of the target.
 */
EXPORT int64_t gracetune_gather(int target, const char *paths, int64_t count,
                                const int64_t *offsets, int64_t *nbytes, int64_t *starts) {
    Channel channel;
    int full = 0;
    int64_t total = 0;
    if (!open_channel(&channel, target)) {
        for (int64_t row = 0; row < count; row++) nbytes[row] = ODD;
        return 0;
    }
    for (int64_t row = 0; row < count && full == 0; row++, paths += strlen(paths) + 1) {
        int odd = 0, file = open(paths, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        starts[row] = total;
        if (file >= 0 && is_as_known(file, offsets[row], nbytes[row])) {
            off64_t from = offsets[row] == WHOLE ? 0 : offsets[row];
            int64_t came = bring(&channel, file, from, nbytes[row], &odd, &full);
            total += came; /* of a file that breaks off, too: its bytes are there, and nobody's */
            nbytes[row] = odd != 0 ? ODD : came;
        } else {
            nbytes[row] = ODD;
        }
        if (file >= 0) close(file);
    }
    if (full == 0) full = flush(&channel);
    close_channel(&channel);
    return full != 0 ? full : total;
}

#if defined(__x86_64__)
typedef int64_t Line __attribute__((vector_size(LINE), aligned(1), may_alias));

/* Whole lines, so that what is overwritten need not be read first, and four at a time. They are
 * asked for a page before, because the processor stops looking ahead at every page. */
__attribute__((target("avx512f"))) static void copy_lines(char *target, const char *piece,
                                                          const char *next, int64_t nbytes) {
    int64_t at = 0;
    for (; at + 4 * LINE <= nbytes; at += 4 * LINE) {
        int64_t ahead = at + AHEAD;
        const char *soon = ahead < nbytes ? piece + ahead : next + (ahead - nbytes);
        for (int line = 0; line < 4; line++) __builtin_prefetch(soon + line * LINE, 0, 2);
        const Line *from = (const Line *)(piece + at);
        Line first = from[0], second = from[1], third = from[2], fourth = from[3];
        Line *to = (Line *)(target + at);
        to[0] = first, to[1] = second, to[2] = third, to[3] = fourth;
    }
    memcpy(target + at, piece + at, (size_t)(nbytes - at));
}
#endif

/* Copy `count` pieces of memory of one length behind each other. */
EXPORT void gracetune_join(char *target, const char *const *pieces, int64_t count, int64_t nbytes) {
#if defined(__x86_64__)
    if (nbytes >= LARGE && __builtin_cpu_supports("avx512f")) {
        for (int64_t row = 0; row < count; row++, target += nbytes)
            copy_lines(target, pieces[row], pieces[row + 1 < count ? row + 1 : row], nbytes);
        return;
    }
#endif
    for (int64_t row = 0; row < count; row++, target += nbytes)
        memcpy(target, pieces[row], (size_t)nbytes);
}
