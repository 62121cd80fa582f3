/* A libnrt that pretends, by the public ABI (aws-neuron-sdk, src/libnrt/include/nrt/nrt.h, nrt_status.h, nrt_version.h).
 *
 * It keeps the rules that the headers and the field reports state: what needs nrt_init fails before it and after nrt_close; HBM is
 * mapped only if NEURON_RT_MAP_HBM was set when the first tensor was made; one dma-buf takes one EFA device, of which there are so
 * many; a dma-buf begins on a page; the text of an EFA device's address needs room. double_* is the test's side. */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SUCCESS = 0, FAILURE = 1, INVALID = 2, INVALID_HANDLE = 3, RESOURCE = 4, UNINITIALIZED = 13, CLOSED = 14 };
enum { MAX = 256, PAGE = 4096 };

typedef struct {
    uint64_t major, minor, patch, maintenance;
    char detail[128], git_hash[64];
} nrt_version_t;
typedef struct {
    size_t bytes_used, bytes_limit;
} nrt_vnc_memory_stats_t;
typedef struct nrt_tensor {
    char *memory; /* where it is */
    void *va;     /* what a process sees of it: NULL unless HBM is mapped */
    size_t size;
    int device, adopted;
} nrt_tensor_t;

static struct {
    int state; /* 0 before nrt_init, 1, 2 after nrt_close */
    int before; /* what a call that needs nrt_init returns before it */
    int mapped; /* -1 until the first tensor */
    uint32_t total, visible;
    size_t limit, used;
    int exports, exports_limit;
    int inits, host_device_calls, bdf_calls;
    int host[MAX], hosts;
    char bdf[MAX][64];
    nrt_tensor_t *tensors[MAX];
    char forced[MAX][40];
    int forced_status[MAX], forcings;
} it;

/* --- the test's side ------------------------------------------------------------------------------------------------- */

void double_reset(void)
{
    for (int i = 0; i < MAX; i++) {
        if (it.tensors[i] && !it.tensors[i]->adopted)
            munmap(it.tensors[i]->memory, it.tensors[i]->size);
        free(it.tensors[i]);
    }
    memset(&it, 0, sizeof it);
    it.before = UNINITIALIZED;
    it.mapped = -1;
    it.total = 64;
    it.visible = 1;
    it.limit = (size_t)96 << 30;
    it.exports_limit = MAX;
}

/* From now on a function returns this, whatever it is asked. */
void double_force(const char *function, int status)
{
    snprintf(it.forced[it.forcings], sizeof it.forced[0], "%s", function);
    it.forced_status[it.forcings++] = status;
}

void double_before(int status) { it.before = status; }
void double_attach(int device, const char *bdf) { snprintf(it.bdf[device], sizeof it.bdf[0], "%s", bdf); }
void double_cores(uint32_t total, uint32_t visible) { it.total = total, it.visible = visible; }
void double_limits(size_t bytes, int exports) { it.limit = bytes, it.exports_limit = exports; }
void double_host_devices(const int *host, int count)
{
    memcpy(it.host, host, sizeof(int) * (size_t)count);
    it.hosts = count;
}
int double_count(const char *what)
{
    return !strcmp(what, "inits") ? it.inits : !strcmp(what, "bdf") ? it.bdf_calls : it.host_device_calls;
}

static int keep(nrt_tensor_t *tensor)
{
    for (int i = 0; i < MAX; i++)
        if (!it.tensors[i]) {
            it.tensors[i] = tensor;
            return 1;
        }
    return 0;
}

/* Let memory of the test's own be HBM of a device, as torch's allocator has it. */
void double_adopt(void *memory, size_t size, int device)
{
    nrt_tensor_t *tensor = calloc(1, sizeof *tensor);
    *tensor = (nrt_tensor_t){memory, memory, size, device, 1};
    keep(tensor);
}

/* --- the library's --------------------------------------------------------------------------------------------------- */

static int forced(const char *function)
{
    for (int i = it.forcings - 1; i >= 0; i--)
        if (!strcmp(it.forced[i], function))
            return it.forced_status[i];
    return -1;
}

#define MAY_BE_FORCED() \
    do { \
        int status_ = forced(__func__); \
        if (status_ >= 0) \
            return status_; \
    } while (0)
#define NEEDS_INIT() \
    do { \
        MAY_BE_FORCED(); \
        if (it.state != 1) \
            return it.state == 2 ? CLOSED : it.before; \
    } while (0)

static nrt_tensor_t *holding(uint64_t va, uint64_t size)
{
    for (int i = 0; i < MAX; i++) {
        nrt_tensor_t *one = it.tensors[i];
        uint64_t base = one ? (uint64_t)one->va : 0;
        if (base && va >= base && va + size <= base + one->size)
            return one;
    }
    return NULL;
}

int nrt_get_version(nrt_version_t *version, size_t size)
{
    MAY_BE_FORCED();
    nrt_version_t mine = {2, 34, 10, 0, "", ""};
    memcpy(version, &mine, size < sizeof mine ? size : sizeof mine);
    return SUCCESS;
}

int nrt_get_total_vnc_count(uint32_t *count)
{
    MAY_BE_FORCED();
    *count = it.total;
    return SUCCESS;
}

int nrt_get_visible_vnc_count(uint32_t *count)
{
    MAY_BE_FORCED();
    *count = it.visible;
    return SUCCESS;
}

int nrt_host_device_id_get(int device, uint32_t *host)
{
    it.host_device_calls++;
    MAY_BE_FORCED();
    if (device < 0 || device >= it.hosts)
        return INVALID;
    *host = (uint32_t)it.host[device];
    return SUCCESS;
}

int nrt_init(int framework, const char *fw_version, const char *fal_version)
{
    MAY_BE_FORCED();
    if (framework < 1 || framework > 5 || !fw_version || !fal_version)
        return INVALID;
    it.inits++;
    it.state = 1;
    return SUCCESS;
}

void nrt_close(void) { it.state = 2; }

int nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t in, size_t *out)
{
    NEEDS_INIT();
    if (vnc >= it.visible)
        return INVALID;
    nrt_vnc_memory_stats_t mine = {it.used, it.limit};
    *out = in < sizeof mine ? in : sizeof mine;
    memcpy(stats, &mine, *out);
    return SUCCESS;
}

int nrt_tensor_allocate(int placement, int vnc, size_t size, const char *name, nrt_tensor_t **tensor)
{
    (void)name;
    NEEDS_INIT();
    if (placement != 0 || vnc < 0 || (uint32_t)vnc >= it.visible)
        return INVALID;
    if (size > it.limit - it.used)
        return RESOURCE;
    if (it.mapped < 0) {
        const char *said = getenv("NEURON_RT_MAP_HBM");
        it.mapped = said && (!strcmp(said, "true") || atoi(said) > 0);
    }
    nrt_tensor_t *made = calloc(1, sizeof *made);
    made->memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    made->va = it.mapped ? made->memory : NULL;
    made->size = size;
    it.used += size;
    keep(made);
    *tensor = made;
    return SUCCESS;
}

void nrt_tensor_free(nrt_tensor_t **tensor)
{
    for (int i = 0; i < MAX; i++)
        if (it.tensors[i] == *tensor) {
            it.used -= (*tensor)->size;
            munmap((*tensor)->memory, (*tensor)->size);
            free(*tensor);
            it.tensors[i] = NULL;
        }
    *tensor = NULL;
}

void *nrt_tensor_get_va(const nrt_tensor_t *tensor) { return tensor->va; }

int nrt_get_dmabuf_fd(uint64_t va, uint64_t size, int *fd)
{
    NEEDS_INIT();
    if (va % PAGE || !holding(va, size))
        return INVALID;
    if (it.exports >= it.exports_limit)
        return RESOURCE;
    it.exports++;
    *fd = memfd_create("dmabuf", 0);
    return SUCCESS;
}

#ifndef BEFORE_2_29
int nrt_get_attached_efa_bdf(const void *va, char *bdf, size_t *length)
{
    it.bdf_calls++;
    NEEDS_INIT();
    nrt_tensor_t *tensor = holding((uint64_t)va, 1);
    if (!tensor || !it.bdf[tensor->device][0])
        return FAILURE;
    size_t needed = strlen(it.bdf[tensor->device]) + 1;
    if (*length < needed)
        return RESOURCE;
    memcpy(bdf, it.bdf[tensor->device], needed);
    *length = needed - 1;
    return SUCCESS;
}
#endif
