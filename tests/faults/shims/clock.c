/* A host whose time is set: preload this below whatever asks what time it is.

   $CLOCK_SHIM names a file of 8 bytes: by how many seconds the time of day is ahead of what it really is,
   as a native integer. Every process looks there at every call. The monotonic clocks stay as they are. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *ahead_s;

__attribute__((constructor)) static void find_file(void) {
    const char *path = getenv("CLOCK_SHIM");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) abort(); /* not to be taken for a time that was never set */
    ahead_s = mmap(NULL, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
    if (ahead_s == MAP_FAILED) abort();
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && ahead_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead_s;
    return (int)failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
