"""The only sockets, threads and grpc of this package. Transports carry bytes and know no message."""

import os

# grpc reads this once, when it is first imported. With its event engine each read wakes a thread of grpc's own, which
# wakes the caller's; without, the thread that waits for a frame reads the socket itself: a quarter less processor
# time a byte on the receiving side, measured on grpcio 1.85 (docs/log.md). A user's own setting stands.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
