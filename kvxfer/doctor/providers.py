"""Lists what a libfabric offers NIXL, as JSON: the same question that NIXL's getAvailableNetworkDevices asks (nixl 1.4.1).

Run as a script with the library's path. The structures are those of libfabric's ABI 1.x (rdma/fabric.h, rdma/fi_domain.h,
rdma/fi_endpoint.h), as far as they are used. It imports nothing of kvxfer.
"""

import ctypes
import json
import os
import sys

_VERSION = 1 << 16 | 18  # FI_VERSION(1, 18)
_MSG, _RMA, _LOCAL, _REMOTE = 1 << 1, 1 << 2, 1 << 51, 1 << 52
_CONTEXT = 1 << 59
_RDM = 3
_NODATA = -61


class _EndpointAttributes(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int),)


class _DomainAttributes(ctypes.Structure):
    _fields_ = (
        ("domain", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("threading", ctypes.c_int),
        ("control_progress", ctypes.c_int),
        ("data_progress", ctypes.c_int),
        ("resource_mgmt", ctypes.c_int),
        ("av_type", ctypes.c_int),
        ("mr_mode", ctypes.c_int),
    )


class _FabricAttributes(ctypes.Structure):
    _fields_ = (("fabric", ctypes.c_void_p), ("name", ctypes.c_char_p), ("prov_name", ctypes.c_char_p))


class _Info(ctypes.Structure):
    pass


_Info._fields_ = (
    ("next", ctypes.POINTER(_Info)),
    ("caps", ctypes.c_uint64),
    ("mode", ctypes.c_uint64),
    ("addr_format", ctypes.c_uint32),
    ("src_addrlen", ctypes.c_size_t),
    ("dest_addrlen", ctypes.c_size_t),
    ("src_addr", ctypes.c_void_p),
    ("dest_addr", ctypes.c_void_p),
    ("handle", ctypes.c_void_p),
    ("tx_attr", ctypes.c_void_p),
    ("rx_attr", ctypes.c_void_p),
    ("ep_attr", ctypes.POINTER(_EndpointAttributes)),
    ("domain_attr", ctypes.POINTER(_DomainAttributes)),
    ("fabric_attr", ctypes.POINTER(_FabricAttributes)),
)


def list_providers(path: str) -> list[dict[str, str]]:
    """Ask the libfabric at ``path``. Raises OSError with libfabric's own error."""
    fabric = ctypes.CDLL(path)
    fabric.fi_dupinfo.restype = ctypes.POINTER(_Info)
    fabric.fi_strerror.restype = ctypes.c_char_p
    hints = fabric.fi_dupinfo(None)  # fi_allocinfo() is an inline function over this
    hints.contents.caps = _MSG | _RMA | _LOCAL | _REMOTE
    hints.contents.mode = _CONTEXT
    hints.contents.ep_attr.contents.type = _RDM
    hints.contents.domain_attr.contents.mr_mode = ~3
    found = ctypes.POINTER(_Info)()
    code = fabric.fi_getinfo(_VERSION, None, None, ctypes.c_uint64(0), hints, ctypes.byref(found))
    if code == _NODATA:
        return []
    if code:
        raise OSError(-code, fabric.fi_strerror(-code).decode())
    entries = []
    while found:
        info = found.contents
        if info.domain_attr and info.fabric_attr:
            values = {
                "provider": info.fabric_attr.contents.prov_name,
                "domain": info.domain_attr.contents.name,
                "fabric": info.fabric_attr.contents.name,
            }
            entries.append({key: (value or b"").decode() for key, value in values.items()})
        found = info.next
    return entries


if __name__ == "__main__":
    _out = os.dup(1)
    os.dup2(2, 1)  # a provider may print when it is initialised
    os.write(_out, json.dumps(list_providers(sys.argv[1])).encode())
