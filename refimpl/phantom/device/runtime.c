/* CUDA's runtime, as much of it as PyTorch calls: devices, memory, streams, graphs, kernels.
 *
 * Nothing runs beside the host, so all work is done when it is asked for: streams are in order, and events have
 * happened. Kernels are not run.
 */
#define _GNU_SOURCE
#include "declarations.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static __thread int current, last_error;

static int failed(int error)
{
    return last_error = error;
}

/* ---- devices ---- */

struct device *phantom_current(void) { phantom_start(); return phantom_devices + current; }
int phantom_index(void) { phantom_start(); return current; }

API int cudaGetDeviceCount(int *out)
{
    phantom_start();
    *out = phantom_count;
    return phantom_count ? SUCCESS : failed(NO_DEVICE);
}
API int cudaGetDevice(int *out) { *out = current; return SUCCESS; }
API int cudaSetDevice(int device)
{
    phantom_start();
    if (device < 0 || device >= phantom_count) return failed(INVALID_DEVICE);
    current = device;
    return SUCCESS;
}
API int cudaDriverGetVersion(int *out) { *out = 13010; return SUCCESS; }
API int cudaRuntimeGetVersion(int *out) { *out = 13010; return SUCCESS; }
API int cudaDeviceCanAccessPeer(int *out, int a, int b) { *out = a != b; return SUCCESS; }
API int cudaDeviceGetPCIBusId(char *out, int size, int device)
{
    snprintf(out, size, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}
API int cudaGetDeviceProperties(struct properties *p, int device)
{
    phantom_start();
    if (device < 0 || device >= phantom_count) return failed(INVALID_DEVICE);
    *p = (struct properties){
        .memory = phantom_devices[device].total, .major = phantom_major, .minor = phantom_minor,
        .processors = phantom_processors, .bus = device + 1, .warp_size = 32, .threads_per_block = 1024,
        .block_size = {1024, 1024, 64}, .grid_size = {0x7fffffff, 65535, 65535}, 
        .threads_per_processor = phantom_major == 7 && phantom_minor == 5 ? 1024
            : phantom_major == 12 || (phantom_major == 8 && phantom_minor) ? 1536 : 2048,
        .blocks_per_processor = 32, .registers_per_block = 65536, .registers_per_processor = 65536,
        .shared_per_block = 48 << 10, .shared_per_processor = 228 << 10, .shared_optin = 227 << 10,
        .shared_reserved = 1024, .constants = 65536, .l2_bytes = 50 << 20, .bus_width = 5120, .pitch = 0x7fffffff,
        .texture_alignment = 512, .pitch_alignment = 32, .copy_engines = 3, .maps_host_memory = 1,
        .concurrent_kernels = 1, .unified_addressing = 1, .stream_priorities = 1, .cooperative = 1, .pools = 1,
        .clusters = phantom_major >= 9};
    snprintf(p->name, sizeof p->name, "%s", phantom_name);
    memcpy(p->uuid, "phantom", 7);
    p->uuid[15] = (char)device;
    return SUCCESS;
}

/* By the numbers of cudaDeviceAttr, which are the driver's, too. */
int phantom_attribute(int attribute, int device)
{
    struct properties p;
    if (cudaGetDeviceProperties(&p, device)) return 0;
    switch (attribute) {
    case 1: return p.threads_per_block;
    case 2: case 3: case 4: return p.block_size[attribute - 2];
    case 5: case 6: case 7: return p.grid_size[attribute - 5];
    case 8: return (int)p.shared_per_block;
    case 9: return (int)p.constants;
    case 10: return p.warp_size;
    case 12: return p.registers_per_block;
    case 13: case 36: return 1000000; /* kHz of processors and memory: nothing here has a clock */
    case 16: return p.processors;
    case 37: return p.bus_width;
    case 38: return p.l2_bytes;
    case 39: return p.threads_per_processor;
    case 40: return p.copy_engines;
    case 75: return p.major;
    case 76: return p.minor;
    case 81: return (int)p.shared_per_processor;
    case 82: return p.registers_per_processor;
    case 97: return (int)p.shared_optin;
    case 106: return p.blocks_per_processor;
    case 111: return (int)p.shared_reserved;
    case 19: case 31: case 41: case 78: case 90: case 95: case 99: case 102: case 115:
        return 1; /* mapped host memory, concurrent kernels, one address space, priorities, preemption, cooperation,
                     registered host memory, virtual memory, pools */
    }
    return 0;
}
API int cudaDeviceGetAttribute(int *out, int attribute, int device)
{
    phantom_start();
    if (device < 0 || device >= phantom_count) return failed(INVALID_DEVICE);
    *out = phantom_attribute(attribute, device);
    return SUCCESS;
}

/* ---- errors ---- */

API int cudaGetLastError(void) { int error = last_error; last_error = SUCCESS; return error; }
API int cudaPeekAtLastError(void) { return last_error; }
API const char *cudaGetErrorString(int error)
{
    switch (error) {
    case SUCCESS: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case INVALID_VALUE: return "invalid argument";
    case INVALID_DEVICE: return "invalid device ordinal";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case NO_NUMBERS: return "too many numbers were read of a device that computes nothing";
    case CAPTURING: return "operation not permitted when stream is capturing";
    case NOT_SUPPORTED: return "operation not supported by the device without kernels";
    }
    return "an error of the device without kernels";
}
API const char *cudaGetErrorName(int error)
{
    return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaError";
}

/* ---- memory ---- */

API int cudaMalloc(void **out, size_t size)
{
    *out = size ? phantom_allocate(phantom_current(), size) : NULL;
    return *out || !size ? SUCCESS : failed(OUT_OF_MEMORY);
}
API int cudaMallocAsync(void **out, size_t size) { return cudaMalloc(out, size); }
API int cudaFree(void *at)
{
    phantom_start();
    return !at || phantom_free(at) ? SUCCESS : failed(INVALID_VALUE);
}
API int cudaFreeAsync(void *at) { return cudaFree(at); }
API int cudaMemGetInfo(size_t *left, size_t *total)
{
    struct device *d = phantom_current();
    *left = d->total - d->used;
    *total = d->total;
    return SUCCESS;
}
API int cudaDeviceGetDefaultMemPool(void **out, int device) { *out = phantom_devices + device; return SUCCESS; }
API int cudaMemPoolGetAttribute(struct device *pool, int attribute, uint64_t *out)
{
    *out = pool->used;
    return SUCCESS;
}

/* Page-locked host memory: `ours` if it was taken here, else only registered. */
struct locked { char *at; size_t size; int ours; struct locked *next; };
static struct locked *locked;
static pthread_mutex_t locked_lock = PTHREAD_MUTEX_INITIALIZER;

static int lock_pages(void *at, size_t size, int ours)
{
    struct locked *one = malloc(sizeof *one);
    if (!one) return failed(OUT_OF_MEMORY);
    pthread_mutex_lock(&locked_lock);
    *one = (struct locked){at, size, ours, locked};
    locked = one;
    pthread_mutex_unlock(&locked_lock);
    return SUCCESS;
}
static int unlock_pages(void *at)
{
    pthread_mutex_lock(&locked_lock);
    struct locked **link = &locked, *one;
    while (*link && (*link)->at != at) link = &(*link)->next;
    if ((one = *link)) *link = one->next;
    pthread_mutex_unlock(&locked_lock);
    if (!one) return 0;
    if (one->ours) munmap(one->at, one->size);
    free(one);
    return 1;
}
static int is_locked(const char *at)
{
    pthread_mutex_lock(&locked_lock);
    struct locked *one = locked;
    while (one && (at < one->at || at >= one->at + one->size)) one = one->next;
    pthread_mutex_unlock(&locked_lock);
    return one != NULL;
}
API int cudaHostAlloc(void **out, size_t size)
{
    void *at = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return failed(OUT_OF_MEMORY);
    return lock_pages(*out = at, size, 1);
}
API int cudaMallocHost(void **out, size_t size) { return cudaHostAlloc(out, size); }
API int cudaFreeHost(void *at) { return !at || unlock_pages(at) ? SUCCESS : failed(INVALID_VALUE); }
API int cudaHostRegister(void *at, size_t size)
{
    return is_locked(at) ? failed(ALREADY_REGISTERED) : lock_pages(at, size, 0);
}
API int cudaHostUnregister(void *at) { return unlock_pages(at) ? SUCCESS : failed(NOT_REGISTERED); }
API int cudaPointerGetAttributes(struct pointer *out, void *at)
{
    phantom_start();
    int device = phantom_device_of(at);
    *out = (struct pointer){.device = -2};
    if (device >= 0) *out = (struct pointer){.type = DEVICE_MEMORY, .device = device, .on_device = at};
    else if (is_locked(at)) *out = (struct pointer){HOST_MEMORY, current, at, at, {0}};
    return SUCCESS;
}

/* ---- streams and captures: what is captured does not happen ---- */

struct capture { unsigned long long id; size_t nodes; int over; };
struct stream { int device, priority; unsigned long long id; struct capture *capture; };
struct event { struct timespec at; struct capture *capture; int recorded; };
struct graph { size_t nodes; };
static unsigned long long ids;

static struct capture *capture_of(struct stream *s) /* streams 0, 1 and 2 are the default ones */
{
    if ((uintptr_t)s <= 2 || !s->capture) return NULL;
    if (s->capture->over) s->capture = NULL;
    return s->capture;
}
static int captured(struct stream *s)
{
    struct capture *capture = capture_of(s);
    if (capture) capture->nodes++;
    return capture != NULL;
}

API int cudaStreamCreateWithPriority(struct stream **out, unsigned flags, int priority)
{
    phantom_start();
    *out = malloc(sizeof **out);
    **out = (struct stream){current, priority, __sync_add_and_fetch(&ids, 1), NULL};
    return SUCCESS;
}
API int cudaStreamCreateWithFlags(struct stream **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API int cudaStreamCreate(struct stream **out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API int cudaStreamDestroy(struct stream *s) { if ((uintptr_t)s > 2) free(s); return SUCCESS; }
API int cudaStreamSynchronize(struct stream *s) { return capture_of(s) ? failed(CAPTURING) : SUCCESS; }
API int cudaStreamGetPriority(struct stream *s, int *out) { *out = (uintptr_t)s > 2 ? s->priority : 0; return SUCCESS; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return SUCCESS; }
API int cudaStreamWaitEvent(struct stream *s, struct event *e)
{
    if (e && e->capture && !e->capture->over && (uintptr_t)s > 2) s->capture = e->capture;
    return SUCCESS;
}
API int cudaLaunchHostFunc(struct stream *s, void (*function)(void *), void *data)
{
    if (!captured(s)) function(data);
    return SUCCESS;
}
API int cudaStreamAddCallback(void *s, void (*function)(void *, int, void *), void *data)
{
    function(s, SUCCESS, data);
    return SUCCESS;
}

API int cudaStreamBeginCapture(struct stream *s)
{
    if ((uintptr_t)s <= 2) return failed(CAPTURING);
    s->capture = calloc(1, sizeof *s->capture); /* never freed: other streams and events may point to it */
    s->capture->id = __sync_add_and_fetch(&ids, 1);
    return SUCCESS;
}
API int cudaStreamEndCapture(struct stream *s, struct graph **out)
{
    struct capture *capture = capture_of(s);
    *out = NULL;
    if (!capture) return failed(ILLEGAL_STATE);
    *out = malloc(sizeof **out);
    (*out)->nodes = capture->nodes;
    capture->over = 1;
    return SUCCESS;
}
API int cudaStreamIsCapturing(struct stream *s, int *out) { *out = capture_of(s) != NULL; return SUCCESS; }
API int cudaStreamGetCaptureInfo(struct stream *s, int *status, unsigned long long *id, void **graph, void **nodes,
                                 void **edges, size_t *count)
{
    struct capture *capture = capture_of(s);
    *status = capture != NULL;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return SUCCESS;
}
API int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    static __thread int now;
    int before = now;
    now = *mode, *mode = before;
    return SUCCESS;
}
API int cudaGraphGetNodes(struct graph *graph, void *nodes, size_t *count)
{
    *count = graph->nodes;
    return SUCCESS;
}
API int cudaGraphDestroy(struct graph *graph) { free(graph); return SUCCESS; }
API int cudaGraphInstantiate(void **out) { *out = malloc(1); return SUCCESS; }
API int cudaGraphInstantiateWithFlags(void **out) { *out = malloc(1); return SUCCESS; }
API int cudaGraphExecDestroy(void *graph) { free(graph); return SUCCESS; }
API int cudaUserObjectCreate(void **out) { *out = &ids; return SUCCESS; }

API int cudaEventCreateWithFlags(void **out) { *out = calloc(1, sizeof(struct event)); return SUCCESS; }
API int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out); }
API int cudaEventDestroy(void *event) { free(event); return SUCCESS; }
API int cudaEventRecordWithFlags(struct event *e, struct stream *s)
{
    clock_gettime(CLOCK_MONOTONIC, &e->at);
    e->capture = capture_of(s);
    e->recorded = 1;
    return SUCCESS;
}
API int cudaEventRecord(struct event *e, struct stream *s) { return cudaEventRecordWithFlags(e, s); }
API int cudaEventElapsedTime(float *out, struct event *a, struct event *b) /* of the host */
{
    if (!a->recorded || !b->recorded) return failed(INVALID_HANDLE);
    *out = (float)((b->at.tv_sec - a->at.tv_sec) * 1e3 + (b->at.tv_nsec - a->at.tv_nsec) * 1e-6);
    return SUCCESS;
}

/* ---- copies ---- */

API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, struct stream *s)
{
    int error = captured(s) ? SUCCESS : phantom_copy(to, from, size);
    return error ? failed(error) : SUCCESS;
}
API int cudaMemcpy(void *to, const void *from, size_t size) { return cudaMemcpyAsync(to, from, size, 0, NULL); }
API int cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, struct stream *s)
{
    return cudaMemcpyAsync(to, from, size, a, s);
}
API int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height,
                          int kind, struct stream *s)
{
    if (!captured(s)) for (size_t i = 0; i < height; i++) phantom_copy(to + i * to_pitch, from + i * from_pitch, width);
    return SUCCESS;
}
API int cudaMemsetAsync(void *at, int value, size_t size, struct stream *s)
{
    if (!captured(s)) phantom_set(at, value, size);
    return SUCCESS;
}
API int cudaMemset(void *at, int value, size_t size) { phantom_set(at, value, size); return SUCCESS; }
API int cudaGetSymbolAddress(void **out) /* of a kernel's global variable: bytes that nobody reads */
{
    static char somewhere[4096];
    *out = somewhere;
    return SUCCESS;
}

/* ---- kernels, which are not run ---- */

API void **__cudaRegisterFatBinary() { static void *handle[1]; return handle; }
API int __cudaGetKernel(void **out, void *host) { *out = host; return SUCCESS; }
API char __cudaInitModule() { return 1; }

static __thread struct launch pushed[16];
static __thread int depth;
API int __cudaPushCallConfiguration(struct extent grid, struct extent block, size_t shared, void *stream)
{
    if (depth == 16) return failed(MISSING_CONFIGURATION);
    pushed[depth++] = (struct launch){grid, block, shared, stream};
    return SUCCESS;
}
API int __cudaPopCallConfiguration(struct extent *grid, struct extent *block, size_t *shared, void **stream)
{
    if (!depth) return failed(MISSING_CONFIGURATION);
    struct launch one = pushed[--depth];
    *grid = one.grid, *block = one.block, *shared = one.shared, *stream = one.stream;
    return SUCCESS;
}
#define LAUNCH(name) API int name(const void *kernel, struct extent grid, struct extent block, void **arguments, \
                                  size_t shared, struct stream *s) { captured(s); return SUCCESS; }
LAUNCH(cudaLaunchKernel) LAUNCH(__cudaLaunchKernel) LAUNCH(cudaLaunchCooperativeKernel)
API int cudaLaunchKernelExC(const struct launch *config) { captured(config->stream); return SUCCESS; }
API int cudaFuncGetAttributes(struct function *out)
{
    int version = phantom_major * 10 + phantom_minor;
    *out = (struct function){.threads = 1024, .registers = 32, .ptx = version, .binary = version, .shared = 48 << 10};
    return SUCCESS;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *kernel, int threads)
{
    *out = threads > 1024 ? 1 : threads > 64 ? 2048 / threads : 32;
    return SUCCESS;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *kernel, int threads)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, kernel, threads);
}

/* ---- the driver's functions by name ---- */

API int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                         int *result)
{
    static void *own;
    Dl_info info;
    char versioned[128];
    if (!own && dladdr((void *)cudaGetDriverEntryPointByVersion, &info))
        own = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *out = own ? dlsym(own, name) : NULL;
    for (int v = 2; v <= 4 && own && !*out; v++) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, v);
        *out = dlsym(own, versioned);
    }
    if (result) *result = *out == NULL; /* 1: no such symbol */
    return SUCCESS;
}
API int cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, int *result)
{
    return cudaGetDriverEntryPointByVersion(name, out, 0, flags, result);
}

NOTHING(cudaDeviceSynchronize) NOTHING(cudaDeviceEnablePeerAccess) NOTHING(cudaMemPoolSetAttribute)
NOTHING(cudaMemPoolSetAccess) NOTHING(cudaMemPoolTrimTo) NOTHING(cudaStreamQuery) NOTHING(cudaEventQuery)
NOTHING(cudaEventSynchronize) NOTHING(cudaGraphLaunch) NOTHING(cudaUserObjectRelease) NOTHING(cudaGraphRetainUserObject)
NOTHING(cudaMemcpyToSymbol) NOTHING(cudaFuncSetAttribute) NOTHING(cudaProfilerStart) NOTHING(cudaProfilerStop)
NOTHING(__cudaRegisterFatBinaryEnd) NOTHING(__cudaUnregisterFatBinary) NOTHING(__cudaRegisterFunction)
NOTHING(__cudaRegisterVar)
