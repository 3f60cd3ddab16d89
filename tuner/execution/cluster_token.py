"""The token of a cluster: whether it wants one, and whether ours will do.

Where RAY_AUTH_MODE is not set, `ray start` wants the token of ~/.ray/auth_token as soon as there is one, but a process
that joins sends none; and one that is refused tries for half a minute. So the head is asked first.
"""

from __future__ import annotations

import os

from tuner.errors import ClusterError

_MODE = "RAY_AUTH_MODE"
_REMEDY = "Copy ~/.ray/auth_token from its head node (`ray get-auth-token` prints it), and set RAY_AUTH_MODE=token."
_TIMEOUT_S = 5.0


def adopt_token() -> None:
    """Have Ray send the token from here on, where there is one and RAY_AUTH_MODE leaves it open."""
    from ray._private.authentication.authentication_token_setup import _enable_token_auth
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if _MODE not in os.environ and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        _enable_token_auth()


def settle_token(address: str) -> None:
    """See that this process sends what the head at `HOST:PORT` or `ray://HOST:PORT` wants.

    Raises:
        ClusterError: It wants a token, which is not there or not the right one.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    if not _is_refused(address, ""):
        return
    if os.environ.get(_MODE, "token").lower() != "token":
        mode = os.environ[_MODE]
        raise ClusterError(f"the cluster at {address} wants a token, and {_MODE} is {mode} here", _REMEDY)
    loader = AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        raise ClusterError(f"the cluster at {address} wants a token, and none was found", _REMEDY)
    adopt_token()
    if _is_refused(address, loader.get_raw_token(ignore_auth_mode=True)):
        raise ClusterError(f"the cluster at {address} wants a token, and it is wrong", _REMEDY)


def _is_refused(address: str, token: str) -> bool:
    """Whether a head says that a token is missing or wrong."""
    import grpc
    from ray.core.generated import gcs_service_pb2, ray_client_pb2

    if address.startswith("ray://"):
        method, question = "/ray.rpc.RayletDriver/ClusterInfo", ray_client_pb2.ClusterInfoRequest()  # type: ignore[attr-defined]
    else:
        method, question = "/ray.rpc.NodeInfoGcsService/GetClusterId", gcs_service_pb2.GetClusterIdRequest()  # type: ignore[attr-defined]
    header = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        ask = channel.unary_unary(method, request_serializer=type(question).SerializeToString)
        try:
            ask(question, timeout=_TIMEOUT_S, metadata=header)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False
