/* What PyTorch calls of cuBLAS, cuDNN, NCCL and NVRTC and needs an answer from. Handles are memory that only this file
 * reads; products, convolutions and collectives do nothing. For whatever else it imports, libraries.py writes a line.
 */
#define _GNU_SOURCE
#include "declarations.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HANDLE(name) API int name(void **out) { *out = calloc(1, 4096); return 0; }
#define DESTROY(name) API int name(void *handle) { free(handle); return 0; }

/* ---- cuBLAS and cuBLASLt. PyTorch itself takes their workspaces, from its allocator ---- */

HANDLE(cublasCreate_v2) DESTROY(cublasDestroy_v2)
HANDLE(cublasLtMatmulDescCreate) DESTROY(cublasLtMatmulDescDestroy)
HANDLE(cublasLtMatmulPreferenceCreate) DESTROY(cublasLtMatmulPreferenceDestroy)
HANDLE(cublasLtMatrixLayoutCreate) DESTROY(cublasLtMatrixLayoutDestroy)
API int cublasGetMathMode(int *handle, int *out) { *out = handle[0]; return 0; }
API int cublasSetMathMode(int *handle, int mode) { handle[0] = mode; return 0; }
API int cublasGetPointerMode_v2(int *handle, int *out) { *out = handle[1]; return 0; }
API int cublasSetPointerMode_v2(int *handle, int mode) { handle[1] = mode; return 0; }
API size_t cublasLtGetVersion() { return 130100; }
API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *op, void *a, void *b, void *c, void *d, void *preference,
                                       int asked, void *results, int *returned)
{
    struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int rest[4]; } *result = results;
    if ((*returned = asked > 0)) memset(result, 0, sizeof *result);
    return 0;
}

/* ---- cuDNN: one engine for every graph. It needs no workspace; a real one often does ---- */

enum { BOOLEAN = 2, INT64 = 3, DOUBLE = 5, POINTER = 6, DESCRIPTOR = 15 };                  /* types of attributes */
enum { KNOBS = 302, ENGINE_KNOBS = 1302, NUMERICAL_NOTES = 1303, BEHAVIOUR_NOTES = 1305 };  /* lists, empty here */
API int cudnnBackendGetAttribute(void *of, int attribute, int type, int64_t room, int64_t *count, void *out)
{
    int none = attribute == KNOBS || attribute == ENGINE_KNOBS || attribute == NUMERICAL_NOTES
               || attribute == BEHAVIOUR_NOTES;
    if (count) *count = !none;
    if (!none && out && room > 0 && type != DESCRIPTOR)
        memset(out, 0, type == BOOLEAN ? 1 : type == INT64 || type == DOUBLE || type == POINTER ? 8 : 4);
    return 0;
}
API int cudnnBackendCreateDescriptor(int type, void **out) { *out = calloc(1, 64); *(int *)*out = type; return 0; }
DESTROY(cudnnBackendDestroyDescriptor)
NOTHING(cudnnBackendSetAttribute) NOTHING(cudnnBackendFinalize) NOTHING(cudnnBackendExecute)
HANDLE(cudnnCreate) HANDLE(cudnnCreateTensorDescriptor) HANDLE(cudnnCreateFilterDescriptor)
HANDLE(cudnnCreateConvolutionDescriptor) HANDLE(cudnnCreateActivationDescriptor) HANDLE(cudnnCreateDropoutDescriptor)
DESTROY(cudnnDestroyTensorDescriptor) DESTROY(cudnnDestroyFilterDescriptor) DESTROY(cudnnDestroyConvolutionDescriptor)
DESTROY(cudnnDestroyActivationDescriptor) DESTROY(cudnnDestroyDropoutDescriptor)
#define CUDNN 92400 /* at least that which PyTorch was built with */
API size_t cudnnGetVersion() { return CUDNN; }
API size_t cudnnGetCudartVersion() { return 13010; }
API int cudnnGetProperty(int part, int *out) /* major, minor, patch */
{
    *out = part == 0 ? CUDNN / 10000 : part == 1 ? CUDNN / 100 % 100 : CUDNN % 100;
    return 0;
}
/* Batch norms of images with channels last. A real one may keep some bytes for backward. */
NOTHING(cudnnSetTensorNdDescriptor) NOTHING(cudnnSetActivationDescriptor) NOTHING(cudnnBatchNormalizationBackwardEx)
NOTHING(cudnnBatchNormalizationForwardTrainingEx) NOTHING(cudnnBatchNormalizationForwardInference)
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int op, void *x, void *z,
                                                                 void *y, void *scale, void *then, size_t *out)
{
    return *out = 0;
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int op, void *then, void *x,
                                                             size_t *out)
{
    return *out = 0;
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int op, void *x, void *y, void *dy,
                                                          void *dz, void *dx, void *scale, void *then, size_t *out)
{
    return *out = 0;
}
/* Its recurrent layers keep what nobody but cuDNN knows: they are refused. */
API const char *cudnnGetErrorString(int status)
{
    return status ? "this part of cuDNN is not on the device without kernels; torch.backends.cudnn.enabled = False "
                    "takes PyTorch's own" : "success";
}
API void cudnnGetLastErrorString(char *out, size_t size) { snprintf(out, size, "not on the device without kernels"); }
API int cudnnSetStream(void **handle, void *stream) { handle[0] = stream; return 0; }
API int cudnnGetStream(void **handle, void **out) { *out = handle[0]; return 0; }

/* ---- NCCL: as if every rank held what this one holds, and a sum were one of its terms. So a group of N ranks needs no
 * other process. Copies are like any other here: large ones move nothing where there are no numbers ---- */

struct communicator { int ranks, rank, together; }; /* together: all of them are in this process */
struct unique { char bytes[128]; };
API int ncclGetVersion(int *out) { *out = 23007; return 0; }
API int ncclGetUniqueId(struct unique *out) { memset(out, 0, sizeof *out); return 0; }
API const char *ncclGetErrorString() { return "an error of the device without kernels"; }
API const char *ncclGetLastError() { return ""; }
API int ncclCommInitRank(struct communicator **out, int ranks, struct unique id, int rank)
{
    *out = malloc(sizeof **out);
    **out = (struct communicator){ranks, rank, 0};
    return 0;
}
API int ncclCommInitAll(struct communicator **out, int ranks)
{
    for (int i = 0; i < ranks; i++) ncclCommInitRank(out + i, ranks, (struct unique){{0}}, i), out[i]->together = 1;
    return 0;
}
API int ncclCommInitRankConfig(struct communicator **out, int ranks, struct unique id, int rank)
{
    return ncclCommInitRank(out, ranks, id, rank);
}
API int ncclCommSplit(struct communicator *from, int color, int key, struct communicator **out)
{
    *out = malloc(sizeof **out);
    **out = (struct communicator){1, from->rank, 0}; /* how many share the color, no rank can tell alone */
    return 0;
}
static size_t bytes(size_t count, int type) /* int8, uint8, int32, uint32, int64, uint64, half, float, double, ... */
{
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * sizes[type];
}
API int ncclAllReduce(const void *from, void *to, size_t count, int type)
{
    phantom_copy(to, from, bytes(count, type));
    return 0;
}
API int ncclBcast(void *at, size_t count, int type, int root, struct communicator *of)
{
    static __thread const void *from; /* together, as in DataParallel, the root comes first */
    if (of->together && of->rank != root) phantom_copy(at, from, bytes(count, type));
    from = at;
    return 0;
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type) { return ncclAllReduce(from, to, count, type); }
API int ncclReduce(const void *from, void *to, size_t count, int type) { return ncclAllReduce(from, to, count, type); }
API int ncclAllGather(const void *from, char *to, size_t count, int type, struct communicator *of)
{
    for (int i = 0; i < of->ranks; i++) phantom_copy(to + i * bytes(count, type), from, bytes(count, type));
    return 0;
}
API int ncclReduceScatter(const char *from, void *to, size_t count, int type, int how, struct communicator *of)
{
    return ncclAllReduce(from + of->rank % of->ranks * bytes(count, type), to, count, type);
}
API int ncclAlltoAll(const char *from, void *to, size_t count, int type, struct communicator *of)
{
    return ncclAllGather(from + of->rank % of->ranks * bytes(count, type), to, count, type, of);
}
DESTROY(ncclCommDestroy) DESTROY(ncclCommAbort)
API int ncclCommGetAsyncError(void *of, int *out) { *out = 0; return 0; }
API int ncclCommCount(struct communicator *of, int *out) { *out = of->ranks; return 0; }
API int ncclCommUserRank(struct communicator *of, int *out) { *out = of->rank; return 0; }
API int ncclMemAlloc(void **out, size_t size) { return !(*out = phantom_allocate(phantom_current(), size)); }
API int ncclMemFree(void *at) { phantom_free(at); return 0; }
NOTHING(ncclCommFinalize)

/* ---- NVRTC: every program compiles, to nothing ---- */

API int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 1; return 0; }
HANDLE(nvrtcCreateProgram)
API int nvrtcDestroyProgram(void **program) { free(*program); *program = NULL; return 0; }
API int nvrtcGetLoweredName(void *program, const char *name, const char **out) { *out = name; return 0; }
#define EMPTY(what) API int nvrtcGet##what##Size(void *of, size_t *out) { *out = 1; return 0; } \
                    API int nvrtcGet##what(void *of, char *out) { *out = 0; return 0; }
EMPTY(PTX) EMPTY(CUBIN) EMPTY(ProgramLog)
API const char *nvrtcGetErrorString() { return "an error of the device without kernels"; }
NOTHING(nvrtcCompileProgram) NOTHING(nvrtcAddNameExpression)
API const char *cusparseGetErrorString() { return "not supported by the device without kernels"; }
