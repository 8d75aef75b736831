"""A gRPC server that takes anything and answers nothing: what every call costs before it does any work."""

import asyncio
import sys

import grpc

METHOD = "/lenspair.bench.Empty/Call"
MAX_BYTES = 64 * 1024 * 1024


class _Nothing(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        return grpc.unary_unary_rpc_method_handler(_answer)


async def _answer(request: bytes, context: object) -> bytes:
    return b""


async def serve() -> None:
    """Prints its port, and serves until its standard input ends."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_BYTES)])
    server.add_generic_rpc_handlers([_Nothing()])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve())
