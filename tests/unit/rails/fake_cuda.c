/* A libcuda and a libcudart for whom all memory is that of one GPU, whose PCI address is FAKE_GPU. Built twice, under both sonames. */
#include <stdio.h>
#include <stdlib.h>

enum { CONTEXT = 1, MEMORY_TYPE = 2, IS_MANAGED = 8, ORDINAL = 9 };

int cuPointerGetAttributes(unsigned count, int *attributes, void **data, unsigned long long pointer)
{
    (void)pointer;
    for (unsigned i = 0; i < count; ++i) {
        if (attributes[i] == CONTEXT)
            *(void **)data[i] = data;
        else if (attributes[i] == MEMORY_TYPE)
            *(unsigned *)data[i] = 2; /* CU_MEMORYTYPE_DEVICE */
        else if (attributes[i] == IS_MANAGED)
            *(unsigned char *)data[i] = 0;
        else if (attributes[i] == ORDINAL)
            *(int *)data[i] = 0;
    }
    return 0;
}
int cuDeviceGetPCIBusId(char *out, int length, int device)
{
    (void)device;
    snprintf(out, length, "%s", getenv("FAKE_GPU"));
    return 0;
}
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cudaSetDevice(int device) { (void)device; return 0; }
const char *cudaGetErrorString(int code) { (void)code; return "none"; }
