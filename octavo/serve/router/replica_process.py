"""A replica's process: `python -m octavo.serve.router.replica_process INDEX FD PARENT`, which replica.py starts.

It serves at the socket FD what standard input tells it: the router's versions, then a pickled (build_engine,
ServerConfig). It ends with the router.
"""

import logging
import pickle
import socket
import sys
import threading

from octavo.distributed.agreement import check_versions
from octavo.errors import BackendError, OctavoError
from octavo.serve.http.server import serve_at
from octavo.serve.router.replica import USAGE_ERROR
from octavo.serve.tensor_worker import follow


def main(arguments: list[str]) -> int:
    """Serve; the exit code: USAGE_ERROR where another start would end alike."""
    index, fd, parent = map(int, arguments)
    threading.Thread(target=follow, args=(parent,), daemon=True).start()
    form = f"%(asctime)s replica {index} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    try:
        check_versions("the router", pickle.load(sys.stdin.buffer), f"replica {index}")
        build_engine, config = pickle.load(sys.stdin.buffer)
        return serve_at(socket.socket(fileno=fd), build_engine, config, ends_with_engine=True)
    except OctavoError as error:
        print(f"error: replica {index}: {error}", file=sys.stderr)
        return 1 if isinstance(error, BackendError) else USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
