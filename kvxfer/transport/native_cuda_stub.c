/* A libcuda.so.1 for hosts that have none.
 *
 * NIXL's LIBFABRIC plugin is linked against the CUDA driver on every host, also where there is no GPU to drive: without
 * a library of that soname it does not load. This one satisfies the linker and answers every call the way NVIDIA's
 * driver does on a host without a GPU: CUDA_ERROR_NO_DEVICE.
 *
 * It has what the plugin needs, and beyond that what the rest of the NIXL wheel (UCX included), the CUDA runtime and
 * Python bindings look for: whoever asks for "libcuda.so.1" after this one was loaded gets this one, and should be told
 * "no device" rather than die of a missing symbol. KVXFER_STUB lines for symbols that a newer plugin needs are appended
 * when it is compiled. The functions take no parameters on purpose: in the C calling conventions of x86-64 and
 * aarch64 a callee may ignore its arguments.
 *
 * No header, no libc: cc -shared -fPIC -nostdlib -Wl,-soname,libcuda.so.1
 */

enum { CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100 };

#define KVXFER_STUB(name) int name(void); int name(void) { return CUDA_ERROR_NO_DEVICE; }

/* The two that are called in order to print an error, and the one that is called to learn whether there is a driver. */
int cuGetErrorName(int error, const char **name);
int cuGetErrorName(int error, const char **name)
{
	(void)error;
	*name = "CUDA_ERROR_NO_DEVICE";
	return CUDA_SUCCESS;
}

int cuGetErrorString(int error, const char **text);
int cuGetErrorString(int error, const char **text)
{
	(void)error;
	*text = "no CUDA device: this is kvxfer's stand-in for libcuda.so.1";
	return CUDA_SUCCESS;
}

int cuDriverGetVersion(int *version);
int cuDriverGetVersion(int *version)
{
	*version = 0; /* what the runtime reports where no driver is installed */
	return CUDA_SUCCESS;
}

/* nixl 1.4.1, libplugin_LIBFABRIC.so */
KVXFER_STUB(cuCtxSetCurrent)
KVXFER_STUB(cuDeviceGetPCIBusId)
KVXFER_STUB(cuPointerGetAttributes)

/* the CUDA runtime, and Python bindings that ask whether there is a device */
KVXFER_STUB(cuInit)
KVXFER_STUB(cuGetProcAddress)
KVXFER_STUB(cuGetProcAddress_v2)

/* nixl 1.4.1, its other plugins and its UCX */
KVXFER_STUB(cuCtxGetCurrent)
KVXFER_STUB(cuCtxGetDevice)
KVXFER_STUB(cuCtxGetId)
KVXFER_STUB(cuCtxPopCurrent_v2)
KVXFER_STUB(cuCtxPushCurrent_v2)
KVXFER_STUB(cuDeviceGet)
KVXFER_STUB(cuDeviceGetAttribute)
KVXFER_STUB(cuDeviceGetCount)
KVXFER_STUB(cuDeviceGetName)
KVXFER_STUB(cuDeviceGetUuid)
KVXFER_STUB(cuDevicePrimaryCtxGetState)
KVXFER_STUB(cuDevicePrimaryCtxRelease_v2)
KVXFER_STUB(cuDevicePrimaryCtxRetain)
KVXFER_STUB(cuDeviceTotalMem_v2)
KVXFER_STUB(cuEventCreate)
KVXFER_STUB(cuEventDestroy_v2)
KVXFER_STUB(cuEventQuery)
KVXFER_STUB(cuEventRecord)
KVXFER_STUB(cuIpcCloseMemHandle)
KVXFER_STUB(cuIpcGetMemHandle)
KVXFER_STUB(cuIpcOpenMemHandle_v2)
KVXFER_STUB(cuMemAddressFree)
KVXFER_STUB(cuMemAddressReserve)
KVXFER_STUB(cuMemAllocManaged)
KVXFER_STUB(cuMemAlloc_v2)
KVXFER_STUB(cuMemCreate)
KVXFER_STUB(cuMemExportToShareableHandle)
KVXFER_STUB(cuMemFree_v2)
KVXFER_STUB(cuMemGetAddressRange_v2)
KVXFER_STUB(cuMemGetAllocationGranularity)
KVXFER_STUB(cuMemGetAllocationPropertiesFromHandle)
KVXFER_STUB(cuMemHostGetDevicePointer_v2)
KVXFER_STUB(cuMemHostRegister_v2)
KVXFER_STUB(cuMemHostUnregister)
KVXFER_STUB(cuMemImportFromShareableHandle)
KVXFER_STUB(cuMemMap)
KVXFER_STUB(cuMemPoolDestroy)
KVXFER_STUB(cuMemPoolExportPointer)
KVXFER_STUB(cuMemPoolExportToShareableHandle)
KVXFER_STUB(cuMemPoolImportFromShareableHandle)
KVXFER_STUB(cuMemPoolImportPointer)
KVXFER_STUB(cuMemPoolSetAccess)
KVXFER_STUB(cuMemRangeGetAttribute)
KVXFER_STUB(cuMemRelease)
KVXFER_STUB(cuMemRetainAllocationHandle)
KVXFER_STUB(cuMemSetAccess)
KVXFER_STUB(cuMemUnmap)
KVXFER_STUB(cuMemcpyAsync)
KVXFER_STUB(cuMemcpyDtoDAsync_v2)
KVXFER_STUB(cuMemcpyHtoD_v2)
KVXFER_STUB(cuMemsetD8_v2)
KVXFER_STUB(cuPointerGetAttribute)
KVXFER_STUB(cuPointerSetAttribute)
KVXFER_STUB(cuStreamAddCallback)
KVXFER_STUB(cuStreamCreate)
KVXFER_STUB(cuStreamDestroy_v2)
KVXFER_STUB(cuStreamSynchronize)
