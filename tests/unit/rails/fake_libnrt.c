/* A libnrt that says of every address what FAKE_NRT says: the PCI address of an EFA device, or nothing. */
#include <stdlib.h>
#include <string.h>

int nrt_get_attached_efa_bdf(const void *address, char *efa, size_t *length)
{
    const char *answer = getenv("FAKE_NRT");
    (void)address;
    if (!answer || strlen(answer) + 1 > *length)
        return answer ? 4 : 1; /* NRT_RESOURCE, NRT_FAILURE */
    strcpy(efa, answer);
    *length = strlen(answer);
    return 0;
}
