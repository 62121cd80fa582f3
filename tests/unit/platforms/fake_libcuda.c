/* A driver with FAKE_GPUS ("0000:59:00.0,0000:5a:00.0"): device i is the i-th of them, whatever the machine has. With FAKE_CUDA_ERROR
 * every call but cuGetErrorName fails with that number. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int started;

static int failed(void)
{
    const char *code = getenv("FAKE_CUDA_ERROR");
    return code ? atoi(code) : 0;
}
int cuInit(unsigned flags)
{
    started = 1;
    return failed() ? failed() : flags ? 1 : 0;
}
int cuDeviceGet(int *device, int ordinal)
{
    const char *gpus = getenv("FAKE_GPUS");
    int count = gpus && *gpus ? 1 : 0;
    for (; gpus && *gpus; ++gpus)
        count += *gpus == ',';
    if (!started)
        return 3; /* CUDA_ERROR_NOT_INITIALIZED */
    if (ordinal < 0 || ordinal >= count)
        return 101; /* CUDA_ERROR_INVALID_DEVICE */
    *device = ordinal + 1000; /* a handle is not an ordinal */
    return 0;
}
int cuDeviceGetPCIBusId(char *out, int length, int device)
{
    const char *gpus = getenv("FAKE_GPUS");
    int width;
    for (device -= 1000; device > 0; --device)
        gpus = strchr(gpus, ',') + 1;
    width = (int)strcspn(gpus, ",");
    if (length <= width)
        return 1; /* CUDA_ERROR_INVALID_VALUE */
    snprintf(out, length, "%.*s", width, gpus);
    return 0;
}
int cuGetErrorName(int code, const char **name)
{
    if (code != 101 && code != 3)
        return 1;
    *name = code == 101 ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_NOT_INITIALIZED";
    return 0;
}
/* Copies are done at once, and FAKE_CUDA_ROOM bytes can be pinned. The context is a token that must be current. */
static long long current;

int cuDevicePrimaryCtxRetain(long long *context, int device)
{
    *context = device;
    return 0;
}
int cuCtxSetCurrent(long long context)
{
    current = context;
    return context >= 1000 ? 0 : 201; /* CUDA_ERROR_INVALID_CONTEXT */
}
int cuMemHostAlloc(void **at, size_t size, unsigned flags)
{
    const char *room = getenv("FAKE_CUDA_ROOM");
    if (!current || flags != 1)
        return 1;
    if (room && (long long)size > atoll(room))
        return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
    return (*at = aligned_alloc(4096, size)) ? 0 : 2;
}
int cuMemFreeHost(void *at)
{
    free(at);
    return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, void *from, size_t size, void *stream)
{
    memcpy((void *)to, from, size);
    return stream ? 0 : 400; /* CUDA_ERROR_INVALID_HANDLE: the default stream is the engine's */
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream)
{
    memcpy(to, (void *)from, size);
    return stream ? 0 : 400;
}
/* An allocation is FAKE_CUDA_ALLOCATION bytes, a power of two, and begins at a multiple of it. */
static unsigned long long allocation(unsigned long long at)
{
    const char *size = getenv("FAKE_CUDA_ALLOCATION");
    return at & ~(size ? strtoull(size, 0, 0) - 1 : ~0ull >> 1);
}
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long at)
{
    const char *told = getenv("FAKE_CUDA_ALLOCATION");
    *base = allocation(at);
    *size = told ? strtoull(told, 0, 0) : ~0ull >> 1;
    return current ? 0 : 201;
}
struct rows {
    size_t from_x, from_y;
    unsigned from_kind;
    char *from_host;
    unsigned long long from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    unsigned to_kind;
    char *to_host;
    unsigned long long to_device;
    void *to_array;
    size_t to_pitch, width, height;
};
int cuMemcpy2DAsync_v2(const struct rows *r, void *stream)
{
    char *to = r->to_kind == 2 ? (char *)r->to_device : r->to_host;
    char *from = r->from_kind == 2 ? (char *)r->from_device : r->from_host;
    size_t row;
    unsigned long long device = r->to_kind == 2 ? r->to_device : r->from_device;
    size_t pitch = r->to_kind == 2 ? r->to_pitch : r->from_pitch;
    if (allocation(device) != allocation(device + (r->height - 1) * pitch + r->width - 1))
        return 1; /* as the real one does, where layers were allocated one by one */
    if (r->from_kind + r->to_kind != 3 || r->width > r->from_pitch || r->width > r->to_pitch || !stream)
        return 1;
    for (row = 0; row < r->height; ++row)
        memcpy(to + row * r->to_pitch, from + row * r->from_pitch, r->width);
    return 0;
}
