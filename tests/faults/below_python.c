/* Fails calls of the C library as a broken disk or a lost NFS server does: preloaded into a training by a test.
 *
 * While the file FAULT_WHEN exists, the call FAULT_CALL (fsync, write, read or rename) fails with the error number
 * FAULT_ERRNO for files whose path contains FAULT_PATH.
 *
 * In the folder SHADOW it keeps what a power cut would leave: of each file and folder that was synced, under the number
 * of its inode, the content at that moment; of a folder that is a line with inode and name for each entry.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

static void keep(int descriptor)
{
    const char *shadow = getenv("SHADOW");
    char from[64], made[PATH_MAX], kept[PATH_MAX], bytes[65536];
    struct stat what;
    if (!shadow || fstat(descriptor, &what) != 0)
        return;
    snprintf(from, sizeof from, "/proc/self/fd/%d", descriptor);
    snprintf(made, sizeof made, "%s/making-%d-%ld", shadow, (int)getpid(), (long)what.st_ino);
    snprintf(kept, sizeof kept, "%s/%ld", shadow, (long)what.st_ino);
    FILE *to = fopen(made, "wb");
    if (S_ISDIR(what.st_mode)) {
        DIR *folder = opendir(from);
        for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
            if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
                fprintf(to, "%ld %d %s\n", (long)entry->d_ino, entry->d_type == DT_DIR, entry->d_name);
        closedir(folder);
    } else {
        FILE *file = fopen(from, "rb");
        for (size_t count; (count = fread(bytes, 1, sizeof bytes, file)) > 0;)
            fwrite(bytes, 1, count, to);
        fclose(file);
    }
    fclose(to);
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    real(made, kept);
}

int fsync(int descriptor)
{
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    if (fails_on("fsync", descriptor))
        return -1;
    int before = errno, result = real(descriptor);
    keep(descriptor);
    errno = before;
    return result;
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
