"""One port before several processes of the same server; needs the extra `serve`. `octavo serve` calls it."""

from octavo.serve.router.router import run_router, split_devices

__all__ = ["run_router", "split_devices"]
