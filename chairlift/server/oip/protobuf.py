"""The messages of oip.proto, made from its compiled descriptor.

The descriptor lives in a pool of its own: a process that also imports tritonclient would otherwise define every
message twice, which protobuf refuses.
"""

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"


def _load() -> descriptor_pool.DescriptorPool:
    raw = resources.files(__package__).joinpath("oip.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(raw).file:
        pool.Add(file)
    return pool


_POOL = _load()


def message(name: str) -> Any:
    """The class of a message of the protocol."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def methods() -> list[Any]:
    """The descriptors of the service's methods."""
    service: Any = _POOL.FindServiceByName(SERVICE)
    return list(service.methods)


ModelConfigResponse = message("ModelConfigResponse")
ModelInferResponse = message("ModelInferResponse")
ModelMetadataResponse = message("ModelMetadataResponse")
ModelReadyResponse = message("ModelReadyResponse")
ModelStatisticsResponse = message("ModelStatisticsResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")
RepositoryIndexResponse = message("RepositoryIndexResponse")
RepositoryModelLoadResponse = message("RepositoryModelLoadResponse")
RepositoryModelUnloadResponse = message("RepositoryModelUnloadResponse")
ServerLiveResponse = message("ServerLiveResponse")
ServerMetadataResponse = message("ServerMetadataResponse")
ServerReadyResponse = message("ServerReadyResponse")
SystemSharedMemoryRegisterResponse = message("SystemSharedMemoryRegisterResponse")
SystemSharedMemoryStatusResponse = message("SystemSharedMemoryStatusResponse")
SystemSharedMemoryUnregisterResponse = message("SystemSharedMemoryUnregisterResponse")
