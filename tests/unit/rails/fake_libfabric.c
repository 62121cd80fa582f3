/* A libfabric that lists EFA devices, opens and registers all that it is asked to, and moves nothing: enough for NIXL to discover a
 * topology, to choose rails for memory, and to log what it chose. With FAKE_NO_RAILS it opens nothing. FI_EFA_IFACE leaves out devices by libfabric's own rule. The devices come from FAKE_EFA: "rdmap85s0-rdm=0:85:0.0,..." with decimal domain:bus:device.function.
 * The structures are those of libfabric's ABI (rdma/fabric.h and rdma/fi_domain.h), as far as NIXL reads them. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct device_and_names { void *object; char *name; char *provider; char room[256]; };
struct domain { void *object; char *name; char room[512]; };
struct pci_bus { int type; struct { uint16_t domain; uint8_t bus, device, function; } at; char room[64]; };
struct link { char *address; size_t mtu, speed; int state; char *network; char room[64]; };
struct nic { size_t class_; void *context, *operations; void *device; struct pci_bus *bus; struct link *link; void *provider; };
struct info {
    struct info *next;
    uint64_t capabilities, mode;
    uint32_t address_format;
    size_t source_length, destination_length;
    void *source, *destination, *handle, *transmit, *receive, *endpoint;
    struct domain *domain;
    struct device_and_names *fabric;
    struct nic *nic;
};

struct info *fi_dupinfo(const struct info *other)
{
    struct info *info = calloc(1, sizeof *info);
    if (other) {
        *info = *other;
        info->next = NULL;
        return info;
    }
    info->transmit = calloc(1, 1024);
    info->receive = calloc(1, 1024);
    info->endpoint = calloc(1, 1024);
    info->domain = calloc(1, sizeof *info->domain);
    info->fabric = calloc(1, sizeof *info->fabric);
    return info;
}

/* prov/efa/src/efa_env.h, efa_env_allows_nic: all, or exact names with commas between them. */
static int allowed(const char *domain)
{
    const char *interfaces = getenv("FI_EFA_IFACE");
    size_t length = strlen(domain);
    if (length > 4 && !strcmp(domain + length - 4, "-rdm"))
        length -= 4; /* what is left is the device's name */
    if (!interfaces || !strncmp(interfaces, "all", 3))
        return 1;
    for (const char *at = interfaces; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, domain, length) && (at[length] == ',' || !at[length]))
            return 1;
    return 0;
}

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct info *hints, struct info **out)
{
    const char *devices = getenv("FAKE_EFA");
    struct info **last = out;
    (void)version, (void)node, (void)service, (void)flags, (void)hints;
    *out = NULL;
    while (devices && *devices) {
        char name[64];
        unsigned domain, bus, device, function;
        int length = 0;
        if (sscanf(devices, "%63[^=]=%u:%u:%u.%u%n", name, &domain, &bus, &device, &function, &length) != 5)
            return -22;
        devices += length + (devices[length] == ',');
        if (!allowed(name))
            continue;
        struct info *info = fi_dupinfo(NULL);
        info->domain->name = strdup(name);
        info->fabric->name = strdup("efa");
        info->fabric->provider = strdup("efa");
        info->nic = calloc(1, sizeof *info->nic);
        info->nic->bus = calloc(1, sizeof *info->nic->bus);
        info->nic->bus->type = 1; /* FI_BUS_PCI */
        info->nic->bus->at.domain = domain;
        info->nic->bus->at.bus = bus;
        info->nic->bus->at.device = device;
        info->nic->bus->at.function = function;
        info->nic->link = calloc(1, sizeof *info->nic->link);
        info->nic->link->speed = 200000000000;
        *last = info;
        last = &info->next;
    }
    return *out ? 0 : -61;
}

void fi_freeinfo(struct info *info) { (void)info; } /* the process ends soon */

/* Objects: one kind of struct serves all, with a table of operations for each kind behind the common head. */
struct object { size_t class_; void *context; const void *operations; const void *a, *b, *c, *d; char room[64]; };
struct region { size_t class_; void *context; const void *operations; void *descriptor; uint64_t key; };

static int done(void) { return 0; }
static long again(void) { return -11; }
static const struct { size_t size; void *calls[8]; } all_done = {sizeof all_done, {done, done, done, done, done, done, done, done}};
static const struct { size_t size; void *calls[10]; } messages = {
    sizeof messages, {done, done, done, done, done, done, done, done, done, done}};
static const struct { size_t size; void *calls[8]; } completions = {
    sizeof completions, {again, again, again, again, again, done, done, done}};

static int getname(void *endpoint, void *address, size_t *length)
{
    (void)endpoint;
    memset(address, 7, *length);
    return 0;
}
static const struct { size_t size; void *calls[8]; } connection = {
    sizeof connection, {done, getname, done, done, done, done, done, done}};

static int insert(void *book, const void *addresses, size_t count, uint64_t *out, uint64_t flags, void *context)
{
    (void)book, (void)addresses, (void)flags, (void)context;
    for (size_t i = 0; i < count; ++i)
        out[i] = i;
    return (int)count;
}
static const struct { size_t size; void *calls[8]; } book = {sizeof book, {insert, done, done, done, done, done, done, done}};

static struct object *made(const void *a, const void *b, const void *c, const void *d)
{
    struct object *object = calloc(1, sizeof *object);
    object->operations = &all_done;
    object->a = a, object->b = b, object->c = c, object->d = d;
    return object;
}
static int open_queue(void *on, void *attributes, struct object **out, void *context)
{
    (void)on, (void)attributes, (void)context;
    return *out = made(&completions, NULL, NULL, NULL), 0;
}
static int open_book(void *on, void *attributes, struct object **out, void *context)
{
    (void)on, (void)attributes, (void)context;
    return *out = made(&book, NULL, NULL, NULL), 0;
}
static int open_endpoint(void *on, void *info, struct object **out, void *context)
{
    (void)on, (void)info, (void)context;
    return *out = made(&all_done, &connection, &messages, &messages), 0;
}
static int reg(struct region **out)
{
    static uint64_t key;
    struct region *region = calloc(1, sizeof *region);
    region->operations = &all_done;
    region->key = ++key;
    return *out = region, 0;
}
static int register_span(void *on, const void *at, size_t length, uint64_t access, uint64_t offset, uint64_t key, uint64_t flags,
                         struct region **out, void *context)
{
    (void)on, (void)at, (void)length, (void)access, (void)offset, (void)key, (void)flags, (void)context;
    return reg(out);
}
static int register_attributes(void *on, const void *attributes, uint64_t flags, struct region **out)
{
    (void)on, (void)attributes, (void)flags;
    return reg(out);
}
static const struct { size_t size; void *calls[12]; } domain_calls = {
    sizeof domain_calls, {open_book, open_queue, open_endpoint, done, done, done, done, done, done, done, done, done}};
static const struct { size_t size; void *calls[3]; } registrations = {
    sizeof registrations, {register_span, done, register_attributes}};

static int open_domain(void *on, void *info, struct object **out, void *context)
{
    (void)on, (void)info, (void)context;
    return *out = made(&domain_calls, &registrations, NULL, NULL), 0;
}
static const struct { size_t size; void *calls[6]; } fabric_calls = {
    sizeof fabric_calls, {open_domain, done, done, done, done, done}};

int fi_fabric(void *attributes, struct object **fabric, void *context)
{
    (void)attributes, (void)context;
    if (getenv("FAKE_NO_RAILS"))
        return -38; /* FI_ENOSYS */
    return *fabric = made(&fabric_calls, NULL, NULL, NULL), 0;
}
const char *fi_strerror(int code) { return strerror(code); }
uint32_t fi_version(void) { return 2u << 16 | 5; }
