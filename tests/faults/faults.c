/* Faults of input and output, put below Python with LD_PRELOAD.
 *
 * faults_set arms one fault: the calls of one kind in a folder are counted, and `times` of them from
 * the k-th on fail. A program sets it by ctypes between its rounds, so one process takes hundreds.
 * While no fault is armed and nothing is counted, every call goes straight to the C library. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, FSYNC, RENAME, CLOSE, UNLINK, MKDIR, KINDS };
/* Instead of an error number: half of the bytes, or an error after the call was done. */
enum { SHORT = -1, DONE_BUT = -1000 };

static char folder[PATH_MAX];
static size_t folder_length;
static atomic_int counting, kind_armed = -1;
static atomic_long first, last;
static int error_armed;
static atomic_long calls[KINDS], hits;

void faults_set(int kind, long k, long times, int error) {
  kind_armed = -1;
  first = k;
  last = k + times - 1;
  error_armed = error;
  for (int i = 0; i < KINDS; i++) calls[i] = 0;
  hits = 0;
  kind_armed = kind;
}

/* Count calls in this folder from now on, or stop counting and failing: NULL. */
void faults_watch(const char *path) {
  counting = 0;
  if (path == NULL) {
    kind_armed = -1;
    return;
  }
  snprintf(folder, sizeof folder, "%s", path);
  folder_length = strlen(folder);
  counting = 1;
}

long faults_calls(int kind) { return calls[kind]; }
long faults_hits(void) { return hits; }

static int inside(const char *path) {
  return strncmp(path, folder, folder_length) == 0 &&
         (path[folder_length] == '/' || path[folder_length] == 0);
}

static int path_of(int descriptor, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return 1;
}

static int in_folder(int directory, const char *path) {
  char start[PATH_MAX], whole[2 * PATH_MAX];
  if (path[0] == '/') return inside(path);
  if (directory == AT_FDCWD ? getcwd(start, sizeof start) == NULL : !path_of(directory, start))
    return 0;
  snprintf(whole, sizeof whole, "%s/%s", start, path);
  return inside(whole);
}

/* The error of this call: 0 if it is not to fail. errno is kept. */
static int fault(int kind, int directory, const char *path) {
  if (!counting) return 0;
  int before = errno, found = 0;
  char of_descriptor[PATH_MAX];
  int ours = path != NULL ? in_folder(directory, path)
                          : path_of(directory, of_descriptor) && inside(of_descriptor);
  if (ours) {
    long number = ++calls[kind];
    if (kind == kind_armed && number >= first && number <= last) {
      hits++;
      found = error_armed;
    }
  }
  errno = before;
  return found;
}

static int failing(int error) {
  errno = error < DONE_BUT ? DONE_BUT - error : error;
  return -1;
}

#define REAL(result, name, ...)                                         \
  static result (*real)(__VA_ARGS__);                                   \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define MODE                               \
  mode_t mode = 0;                         \
  if (flags & (O_CREAT | O_TMPFILE)) {     \
    va_list more;                          \
    va_start(more, flags);                 \
    mode = va_arg(more, mode_t);           \
    va_end(more);                          \
  }

#define OPENS(name)                                        \
  int name(const char *path, int flags, ...) {             \
    REAL(int, name, const char *, int, ...);               \
    MODE;                                                  \
    int error = fault(OPEN, AT_FDCWD, path);               \
    return error > 0 ? failing(error) : real(path, flags, mode); \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                             \
  int name(int directory, const char *path, int flags, ...) {      \
    REAL(int, name, int, const char *, int, ...);                  \
    MODE;                                                          \
    int error = fault(OPEN, directory, path);                      \
    return error > 0 ? failing(error) : real(directory, path, flags, mode); \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

DIR *opendir(const char *path) {
  REAL(DIR *, opendir, const char *);
  int error = fault(OPEN, AT_FDCWD, path);
  if (error <= 0) return real(path);
  failing(error);
  return NULL;
}

/* Half of the bytes, and at least one. */
static size_t cut(int error, size_t n) { return error == SHORT && n > 1 ? n / 2 : n; }

ssize_t read(int file, void *data, size_t n) {
  REAL(ssize_t, read, int, void *, size_t);
  int error = fault(READ, file, NULL);
  return error > 0 ? failing(error) : real(file, data, cut(error, n));
}

ssize_t write(int file, const void *data, size_t n) {
  REAL(ssize_t, write, int, const void *, size_t);
  int error = fault(WRITE, file, NULL);
  return error > 0 ? failing(error) : real(file, data, cut(error, n));
}

#define READS_AT(name, type)                                                   \
  ssize_t name(int file, void *data, size_t n, type at) {                      \
    REAL(ssize_t, name, int, void *, size_t, type);                            \
    int error = fault(READ, file, NULL);                                       \
    return error > 0 ? failing(error) : real(file, data, cut(error, n), at);   \
  }
READS_AT(pread, off_t)
READS_AT(pread64, off64_t)

#define WRITES_AT(name, type)                                                  \
  ssize_t name(int file, const void *data, size_t n, type at) {                \
    REAL(ssize_t, name, int, const void *, size_t, type);                      \
    int error = fault(WRITE, file, NULL);                                      \
    return error > 0 ? failing(error) : real(file, data, cut(error, n), at);   \
  }
WRITES_AT(pwrite, off_t)
WRITES_AT(pwrite64, off64_t)

/* What comes after the call, if it is to be done and to report an error. */
static int end(int error, int result) { return error < DONE_BUT ? failing(error) : result; }

#define SYNCS(name)                                   \
  int name(int file) {                                \
    REAL(int, name, int);                             \
    int error = fault(FSYNC, file, NULL);             \
    return error > 0 ? failing(error) : real(file);   \
  }
SYNCS(fsync)
SYNCS(fdatasync)

int close(int file) {
  REAL(int, close, int);
  int error = fault(CLOSE, file, NULL);
  int result = real(file); /* Linux closes a file whatever it reports */
  return error > 0 ? failing(error) : end(error, result);
}

int rename(const char *from, const char *to) {
  REAL(int, rename, const char *, const char *);
  int error = fault(RENAME, AT_FDCWD, from);
  return error > 0 ? failing(error) : end(error, real(from, to));
}

int renameat(int old, const char *from, int new, const char *to) {
  REAL(int, renameat, int, const char *, int, const char *);
  int error = fault(RENAME, old, from);
  return error > 0 ? failing(error) : end(error, real(old, from, new, to));
}

int unlink(const char *path) {
  REAL(int, unlink, const char *);
  int error = fault(UNLINK, AT_FDCWD, path);
  return error > 0 ? failing(error) : real(path);
}

int unlinkat(int directory, const char *path, int flags) {
  REAL(int, unlinkat, int, const char *, int);
  int error = fault(UNLINK, directory, path);
  return error > 0 ? failing(error) : real(directory, path, flags);
}

int rmdir(const char *path) {
  REAL(int, rmdir, const char *);
  int error = fault(UNLINK, AT_FDCWD, path);
  return error > 0 ? failing(error) : real(path);
}

int mkdir(const char *path, mode_t mode) {
  REAL(int, mkdir, const char *, mode_t);
  int error = fault(MKDIR, AT_FDCWD, path);
  return error > 0 ? failing(error) : real(path, mode);
}
