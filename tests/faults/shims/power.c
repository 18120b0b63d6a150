/* A disk that remembers what it would have kept: preload this below whatever writes.

   $POWER_SHIM is a folder on that disk. Syncing a file or a folder beside it (below its parent) appends
   one line to $POWER_SHIM/journal, tab-separated:

     F <identity> <size> <path>                                    this many bytes of a file are durable
     D <identity> <path> [<name> <identity> <d or f>]...           these names in a folder are durable

   taken before the sync and written after it. An identity is inode and time of birth: inodes are used
   again. Whatever a line names is linked into $POWER_SHIM/inodes, so that what was replaced or removed
   and comes back after a power cut is still there. $POWER_SHIM/delay_ms holds how long a sync takes.
   The disk below is not synced at all: processes die here, not machines. */

#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define IDENTITY 64

/* Write the identity of `name` in folder `at` (or of `at` itself, for ""); say 'd', 'f', or 0 for neither. */
static char identify(int at, const char *name, char *identity, unsigned long long *size) {
    struct statx it;
    int flags = AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH);
    if (statx(at, name, flags, STATX_BASIC_STATS | STATX_BTIME, &it) != 0) return 0;
    snprintf(identity, IDENTITY, "%llu.%lld.%u", (unsigned long long)it.stx_ino,
             (long long)it.stx_btime.tv_sec, it.stx_btime.tv_nsec);
    *size = it.stx_size;
    return S_ISDIR(it.stx_mode) ? 'd' : S_ISREG(it.stx_mode) ? 'f' : 0;
}

static void keep(const char *shim, int at, const char *name, const char *identity) {
    char link_path[PATH_MAX + IDENTITY + 16];
    snprintf(link_path, sizeof link_path, "%s/inodes/%s", shim, identity);
    linkat(at, name, AT_FDCWD, link_path, 0); /* there already: the same file */
}

static void list_names(FILE *line, const char *shim, int folder) {
    int again = openat(folder, ".", O_RDONLY | O_DIRECTORY);
    DIR *names = again < 0 ? NULL : fdopendir(again);
    struct dirent *entry;
    while (names && (entry = readdir(names))) {
        char identity[IDENTITY];
        unsigned long long size;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        char kind = identify(again, entry->d_name, identity, &size);
        if (!kind) continue;
        if (kind == 'f') keep(shim, again, entry->d_name, identity);
        fprintf(line, "\t%s\t%s\t%c", entry->d_name, identity, kind);
    }
    if (names) closedir(names);
}

static void dawdle(const char *shim) {
    char path[PATH_MAX + 16];
    long delay_ms = 0;
    snprintf(path, sizeof path, "%s/delay_ms", shim);
    FILE *file = fopen(path, "r");
    if (!file) return;
    if (fscanf(file, "%ld", &delay_ms) != 1) delay_ms = 0;
    fclose(file);
    struct timespec pause = {delay_ms / 1000, delay_ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

static void append(const char *shim, const char *line, size_t length) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/journal", shim);
    int journal = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (journal < 0 || write(journal, line, length) != (ssize_t)length) abort();
    close(journal);
}

static int sync_and_note(int fd) {
    const char *shim = getenv("POWER_SHIM");
    char link_path[64], path[PATH_MAX + 1], identity[IDENTITY];
    unsigned long long size;
    snprintf(link_path, sizeof link_path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link_path, path, PATH_MAX);
    char kind = identify(fd, "", identity, &size);
    if (length < 0 || !kind) return -1; /* errno says why */
    path[length] = 0;
    size_t root = shim ? (size_t)(strrchr(shim, '/') - shim) : 0;
    if (!shim || strncmp(path, shim, root) || path[root] != '/') return 0;
    char *text = NULL;
    size_t text_length = 0;
    FILE *line = open_memstream(&text, &text_length);
    if (kind == 'f') {
        keep(shim, AT_FDCWD, path, identity);
        fprintf(line, "F\t%s\t%llu\t%s", identity, size, path);
    } else {
        fprintf(line, "D\t%s\t%s", identity, path);
        list_names(line, shim, fd);
    }
    fputc('\n', line);
    fclose(line);
    dawdle(shim);
    append(shim, text, text_length);
    free(text);
    return 0;
}

int fsync(int fd) { return sync_and_note(fd); }
int fdatasync(int fd) { return sync_and_note(fd); }
