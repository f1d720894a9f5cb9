"""What plain sockets reach: `receive` on one side, `send` on the other, which prints bits a second."""

import argparse
import socket
import threading
import time

PIECE = 1 << 20  # bytes of one write
SECONDS = 2.0  # in which the sender writes
TRIES = 200  # to reach a receiver that has just been started


def send(address: str, port: int, streams: int) -> float:
    """Bits a second over so many connections, counted when the receiver has them all."""
    links = [_connected(address, port) for _ in range(streams)]
    began = time.perf_counter()
    sent = [0] * streams

    def work(number: int) -> None:
        piece = memoryview(bytearray(PIECE))
        while time.perf_counter() < began + SECONDS:
            links[number].sendall(piece)
            sent[number] += PIECE
        links[number].shutdown(socket.SHUT_WR)
        links[number].recv(1)  # the receiver has read to the end

    threads = [threading.Thread(target=work, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 8 * sum(sent) / (time.perf_counter() - began)


def _connected(address: str, port: int) -> socket.socket:
    for _ in range(TRIES):
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise RuntimeError("the receiver never listened")


def receive(address: str, port: int, streams: int) -> None:
    """Take whatever comes, and say when it has ended."""

    def work(link: socket.socket) -> None:
        room = bytearray(PIECE)
        while link.recv_into(room):
            pass
        link.sendall(b".")

    with socket.create_server((address, port), backlog=streams) as server:
        threads = [threading.Thread(target=work, args=(server.accept()[0],)) for _ in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("receive", "send"))
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("streams", type=int)
    options = parser.parse_args()
    where = (options.address, options.port, options.streams)
    if options.what == "receive":
        receive(*where)
    else:
        print(send(*where))


if __name__ == "__main__":
    main()
