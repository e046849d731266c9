/* CUDA's driver: what PyTorch's expandable segments, its compiled kernels and Triton's launcher call; and of NVML what
 * PyTorch asks when it words an out-of-memory error.
 */
#define _GNU_SOURCE
#include "declarations.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- devices and contexts ---- */

API int cuInit() { phantom_start(); return phantom_count ? SUCCESS : NO_DEVICE; }
API int cuDriverGetVersion(int *out) { *out = 13010; return SUCCESS; }
API int cuDeviceGetCount(int *out) { phantom_start(); *out = phantom_count; return SUCCESS; }
API int cuDeviceGet(int *out, int index) { *out = index; return SUCCESS; }
API int cuDeviceGetAttribute(int *out, int attribute, int device)
{
    *out = phantom_attribute(attribute, device);
    return SUCCESS;
}
API int cuDeviceGetUuid(char *out, int device)
{
    memset(out, 0, 16);
    memcpy(out, "phantom", 7);
    out[15] = (char)device;
    return SUCCESS;
}
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0, *active = 1;
    return SUCCESS;
}
API int cuDevicePrimaryCtxRetain(void **out, int device) { *out = phantom_devices + device; return SUCCESS; }
API int cuCtxGetCurrent(void **out) { *out = phantom_current(); return SUCCESS; }
API int cuCtxPopCurrent(void **out) { *out = phantom_current(); return SUCCESS; }
API int cuCtxGetDevice(int *out) { *out = phantom_index(); return SUCCESS; }
API int cuCtxGetLimit(size_t *out) { *out = 8 * MIB; return SUCCESS; }
API int cuGetErrorString(int error, const char **out)
{
    *out = error == OUT_OF_MEMORY ? "out of memory" : error ? "an error of the device without kernels" : "no error";
    return SUCCESS;
}
API int cuGetErrorName(int error, const char **out) { return cuGetErrorString(error, out); }
API int cuPointerGetAttribute(void *out, int attribute, void *at)
{
    int device = phantom_device_of(at);
    if (attribute == 3) { *(void **)out = at; return SUCCESS; } /* as the device sees it */
    if (device < 0) return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)out = phantom_devices + device; return SUCCESS; /* the context */
    case 2: *(unsigned *)out = DEVICE_MEMORY; return SUCCESS;
    case 9: *(int *)out = device; return SUCCESS;
    }
    return INVALID_VALUE;
}

/* ---- memory ---- */

API int cuMemFree(void *at) { return phantom_free(at) ? SUCCESS : INVALID_VALUE; }
API int cuMemGetAddressRange(uintptr_t *base, size_t *size, void *at)
{
    struct range range = phantom_range(at);
    if (base) *base = range.address;
    if (size) *size = range.size;
    return range.size ? SUCCESS : NOT_FOUND;
}
API int cuMemsetD32Async(uint32_t *at, uint32_t value, size_t count)
{
    for (size_t i = 0; i < count; i++) at[i] = value;
    return SUCCESS;
}
API int cuStreamWriteValue32(void *stream, uint32_t *at, uint32_t value) { *at = value; return SUCCESS; }

/* Virtual memory: addresses, memory, and one mapped to the other. Memory is gone once it is released and unmapped. */
struct memory { struct device *device; size_t size; int handles, maps; struct allocation as; };
struct map { char *at; size_t size; struct memory *memory; struct map *next; };
static struct map *maps;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void perhaps_gone(struct memory *m)
{
    if (m->handles || m->maps) return;
    phantom_release(m->device, m->size);
    free(m);
}
API int cuMemGetAllocationGranularity(size_t *out) { *out = 2 * MIB; return SUCCESS; }
API int cuMemAddressReserve(void **out, size_t size, size_t alignment)
{
    return (*out = phantom_reserve(phantom_current(), size, alignment)) ? SUCCESS : OUT_OF_MEMORY;
}
API int cuMemAddressFree(void *at) { return cuMemFree(at); }
API int cuMemCreate(struct memory **out, size_t size, const struct allocation *as)
{
    struct device *d = phantom_devices + as->device;
    if (!phantom_hold(d, size)) return OUT_OF_MEMORY;
    *out = malloc(sizeof **out);
    **out = (struct memory){d, size, 1, 0, *as};
    return SUCCESS;
}
API int cuMemRelease(struct memory *m)
{
    pthread_mutex_lock(&lock);
    m->handles--;
    perhaps_gone(m);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
API int cuMemMap(char *at, size_t size, size_t offset, struct memory *m)
{
    struct map *map = malloc(sizeof *map);
    if (!phantom_back(at, size)) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    *map = (struct map){at, size, m, maps};
    maps = map;
    m->maps++;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
API int cuMemUnmap(char *at, size_t size)
{
    pthread_mutex_lock(&lock);
    for (struct map **link = &maps; *link;) {
        struct map *map = *link;
        if (map->at < at || map->at >= at + size) {
            link = &map->next;
            continue;
        }
        *link = map->next;
        map->memory->maps--;
        perhaps_gone(map->memory);
        free(map);
    }
    phantom_unback(at, size);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
API int cuMemRetainAllocationHandle(struct memory **out, char *at)
{
    pthread_mutex_lock(&lock);
    struct map *map = maps;
    while (map && (at < map->at || at >= map->at + map->size)) map = map->next;
    if (map) map->memory->handles++, *out = map->memory;
    pthread_mutex_unlock(&lock);
    return map ? SUCCESS : INVALID_VALUE;
}
API int cuMemGetAllocationPropertiesFromHandle(struct allocation *out, struct memory *m)
{
    *out = m->as;
    return SUCCESS;
}
API int cuMemExportToShareableHandle() { return NOT_SUPPORTED; }
API int cuMemImportFromShareableHandle() { return NOT_SUPPORTED; }

/* ---- compiled kernels, which are loaded and never run ---- */

static int something;
API int cuModuleLoad(void **out) { *out = &something; return SUCCESS; }
API int cuModuleLoadData(void **out) { *out = &something; return SUCCESS; }
API int cuModuleLoadDataEx(void **out) { *out = &something; return SUCCESS; }
API int cuModuleGetFunction(void **out) { *out = &something; return SUCCESS; }
API int cuFuncGetAttribute(int *out, int attribute) /* 0: most threads of a block, 4: registers */
{
    *out = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return SUCCESS;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *kernel, int threads)
{
    *out = threads > 1024 ? 1 : threads > 64 ? 2048 / threads : 32;
    return SUCCESS;
}
API int cuOccupancyMaxActiveClusters(int *out) { *out = 1; return SUCCESS; }

NOTHING(cuCtxSetCurrent) NOTHING(cuCtxPushCurrent) NOTHING(cuCtxSetLimit)
NOTHING(cuMemSetAccess) NOTHING(cuModuleUnload) NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig) NOTHING(cuLaunchKernel) NOTHING(cuLaunchKernelEx) NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuTensorMapEncodeTiled)

/* ---- NVML ---- */

API int nvmlInit_v2() { phantom_start(); return SUCCESS; }
API int nvmlDeviceGetCount_v2(unsigned *out) { phantom_start(); *out = phantom_count; return SUCCESS; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { *out = phantom_devices + index; return SUCCESS; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out)
{
    unsigned domain, number = 1;
    sscanf(bus, "%x:%x", &domain, &number);
    *out = phantom_devices + number - 1;
    return SUCCESS;
}
API int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13010; return SUCCESS; }
API int nvmlDeviceGetComputeRunningProcesses(struct device *d, unsigned *count, void *out) /* this process alone */
{
    struct { unsigned pid; unsigned long long used; unsigned instance, compute; } *process = out;
    unsigned room = *count;
    *count = 1;
    if (!room) return 7; /* the buffer is too small */
    process->pid = getpid(), process->used = d->used, process->instance = process->compute = ~0u;
    return SUCCESS;
}
NOTHING(nvmlShutdown) NOTHING(nvmlDeviceGetGpuFabricInfoV)
