"""Which EFA devices are local to which accelerator, how a process is kept to them, and whether NIXL did as expected.

    pci        addresses and the tree of devices that everything else reasons about
    sysfs      the tree of this machine;  hwloc: the tree of any machine, from lstopo's XML
    instances  what is known of EC2's instance types, with sources
    local      the rails that an accelerator shall use, and why
    predict    what NIXL's LIBFABRIC backend would choose by itself
    policy     the FI_EFA_IFACE of a worker process
    check      a worker's own look at what NIXL did with its memory
    pinning    a worker that keeps itself to its rails: both of these, in their order
    nixl_log   NIXL's debug log, read;  judge: what it did held against what was expected
    counters   EFA's byte counters while traffic runs
    report, command   ``kvxfer rails``

Nothing here imports NIXL, libnrt or CUDA: it works on trees and texts, so that every machine can be judged on any other.
"""
