"""The only sockets, threads and grpc of this package. Transports carry bytes and know no message."""
