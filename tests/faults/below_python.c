/* Fails calls of the C library as a broken disk or a lost NFS server does: preloaded into a training by a test.
 *
 * While the file FAULT_WHEN exists, the call FAULT_CALL (fsync, write, read or rename) fails with the error number
 * FAULT_ERRNO for files whose path contains FAULT_PATH.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(const char *call, const char *path)
{
    const char *when = getenv("FAULT_WHEN"), *name = getenv("FAULT_CALL"), *part = getenv("FAULT_PATH");
    int before = errno;
    int due = when && name && part && strcmp(name, call) == 0 && strstr(path, part) && access(when, F_OK) == 0;
    errno = due ? atoi(getenv("FAULT_ERRNO")) : before;
    return due;
}

static int fails_on(const char *call, int descriptor)
{
    char link[64], path[PATH_MAX + 1];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX);
    path[length > 0 ? length : 0] = '\0';
    return fails(call, path);
}

int fsync(int descriptor)
{
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    return fails_on("fsync", descriptor) ? -1 : real(descriptor);
}

ssize_t write(int descriptor, const void *bytes, size_t count)
{
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    return fails_on("write", descriptor) ? -1 : real(descriptor, bytes, count);
}

ssize_t read(int descriptor, void *bytes, size_t count)
{
    ssize_t (*real)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
    return fails_on("read", descriptor) ? -1 : real(descriptor, bytes, count);
}

int rename(const char *from, const char *to)
{
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    return fails("rename", to) ? -1 : real(from, to);
}
