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
