"""The demo: every part of octavo in one run on real text, and a report of what came out."""

from bench.demo.run import run_demo

__all__ = ["run_demo"]
