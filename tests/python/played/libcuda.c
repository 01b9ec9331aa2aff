// A CUDA driver with one device (132 multiprocessors, 9.0) whose memory is the host's and whose kernels do nothing. Every
// call that tests ask about is a line of the file named by PLAYED_LOG. CAPTURING=1 in the environment: streams capture.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static void note(const char *call, const void *a, const void *b) {
  const char *path = getenv("PLAYED_LOG");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s %p %p\n", call, a, b);
  fclose(file);
}

static int context, module, function;
static void *current;
static long events;

EXPORT int cuInit(unsigned flags) { return 0; }
EXPORT int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
EXPORT int cuGetErrorName(int error, const char **text) { return *text = "CUDA_ERROR_PLAYED", 0; }
EXPORT int cuGetErrorString(int error, const char **text) { return *text = "a played error", 0; }
EXPORT int cuDeviceGetCount(int *count) { return *count = 1, 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
EXPORT int cuDeviceGetName(char *name, int length, int device) { return strncpy(name, "Played", length), 0; }
EXPORT int cuDeviceGetAttribute(int *value, int which, int device) {
  switch (which) {
    case 75: *value = 9; break;        // compute capability, major
    case 76: *value = 0; break;        // minor
    case 16: *value = 132; break;      // multiprocessors
    case 97: *value = 232448; break;   // shared memory of a block, opted in to
    default: return 1;
  }
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **made, int device) { return *made = &context, 0; }
EXPORT int cuCtxGetCurrent(void **now) { return *now = current, 0; }
EXPORT int cuCtxSetCurrent(void *now) { return current = now, 0; }
EXPORT int cuModuleLoadDataEx(void **made, const void *image, unsigned count, int *options, void **values) {
  note("load", NULL, NULL);
  return *made = &module, 0;
}
EXPORT int cuModuleGetFunction(void **made, void *from, const char *name) { return *made = &function, 0; }
EXPORT int cuFuncSetAttribute(void *of, int which, int value) { return 0; }
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
EXPORT int cuStreamIsCapturing(void *stream, int *status) {
  const char *capturing = getenv("CAPTURING");
  return *status = capturing && *capturing == '1', 0;
}
EXPORT int cuMemAlloc_v2(void **made, size_t bytes) {
  *made = aligned_alloc(256, (bytes + 255) / 256 * 256);
  note("alloc", *made, (void *)bytes);
  return *made ? 0 : 2;
}
EXPORT int cuMemFree_v2(void *memory) {
  note("free", memory, NULL);
  return free(memory), 0;
}
EXPORT int cuEventCreate(void **made, unsigned flags) { return *made = (void *)++events, 0; }
EXPORT int cuEventDestroy_v2(void *event) { return note("destroy", event, NULL), 0; }
EXPORT int cuEventRecord(void *event, void *stream) { return note("record", event, stream), 0; }
EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return note("wait", event, stream), 0; }
EXPORT int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
  return note("launch", (void *)(size_t)gx, stream), 0;
}
EXPORT int cuLaunchKernelEx(const unsigned *config, void *f, void **parameters, void **extra) {
  void *stream;
  memcpy(&stream, config + 8, sizeof stream);  // after grid, block and shared bytes
  return note("launch", (void *)(size_t)config[0], stream), 0;
}
