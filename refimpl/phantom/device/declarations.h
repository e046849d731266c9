/* What of CUDA 13's interfaces this device answers: numbers and layouts as PyTorch was built with them, in our words.
 * Where a function's arguments are not used, they are not declared: C passes them, and the function looks at none.
 */
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define NOTHING(name) API int name() { return 0; } /* succeeds: there is nothing to do, or nothing that computes */
#define MIB ((size_t)1 << 20)

enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, MISSING_CONFIGURATION = 52, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       NOT_SUPPORTED = 801, CAPTURING = 900, NO_NUMBERS = 999 };
enum { HOST_MEMORY = 1, DEVICE_MEMORY = 2 };

struct properties { /* cudaDeviceProp; what stands in `rest` is 0 */
    char name[256], uuid[16], rest_1[16];
    size_t memory, shared_per_block;
    int registers_per_block, warp_size;
    size_t pitch;
    int threads_per_block, block_size[3], grid_size[3];
    size_t constants;
    int major, minor;
    size_t texture_alignment, pitch_alignment;
    int processors, integrated, maps_host_memory, rest_2[41];
    int concurrent_kernels, ecc, bus, device, domain, rest_3;
    int copy_engines, unified_addressing, bus_width, l2_bytes, rest_4, threads_per_processor, stream_priorities;
    int rest_5[3];
    size_t shared_per_processor;
    int registers_per_processor, managed, rest_6[5], preemption, rest_7, cooperative;
    size_t shared_optin, rest_8;
    int blocks_per_processor, rest_9;
    size_t shared_reserved, rest_10[2];
    int pools, rest_11[6], clusters, rest_12[64];
};
_Static_assert(offsetof(struct properties, memory) == 288, "cudaDeviceProp.totalGlobalMem");
_Static_assert(offsetof(struct properties, processors) == 384, "cudaDeviceProp.multiProcessorCount");
_Static_assert(offsetof(struct properties, concurrent_kernels) == 560, "cudaDeviceProp.concurrentKernels");
_Static_assert(offsetof(struct properties, threads_per_processor) == 604, "cudaDeviceProp.maxThreadsPerMultiProcessor");
_Static_assert(offsetof(struct properties, shared_optin) == 672, "cudaDeviceProp.sharedMemPerBlockOptin");
_Static_assert(offsetof(struct properties, clusters) == 748 && sizeof(struct properties) == 1008, "cudaDeviceProp");

/* cudaPointerAttributes, cudaFuncAttributes, dim3, cudaLaunchConfig_t and CUmemAllocationProp */
struct pointer { int type, device; void *on_device, *on_host; long rest[8]; };
struct function { size_t sizes[3]; int threads, registers, ptx, binary, cached, shared, rest[24]; };
struct extent { unsigned x, y, z; };
struct launch { struct extent grid, block; size_t shared; void *stream; };
struct allocation { int kind, handles, location, device; char rest[16]; };
_Static_assert(sizeof(struct pointer) == 88 && sizeof(struct function) == 144, "CUDA 13");
_Static_assert(sizeof(struct allocation) == 32, "CUDA 13");

/* memory.c */
struct range { uintptr_t address; size_t size; int backed; };
struct device {
    uintptr_t base;
    size_t total, used;
    struct range *ranges;
    size_t count, room;
};
extern struct device phantom_devices[];
extern int phantom_count, phantom_major, phantom_minor, phantom_processors;
extern const char *phantom_name;
void phantom_start(void);
int phantom_device_of(const void *address);
void *phantom_allocate(struct device *, size_t);
int phantom_free(void *);
void *phantom_reserve(struct device *, size_t, size_t alignment);
int phantom_hold(struct device *, size_t);
void phantom_release(struct device *, size_t);
int phantom_back(void *, size_t);
void phantom_unback(void *, size_t);
struct range phantom_range(const void *);
int phantom_copy(void *to, const void *from, size_t);
void phantom_set(void *, int value, size_t);

/* runtime.c */
struct device *phantom_current(void);
int phantom_index(void);
int phantom_attribute(int attribute, int device);
