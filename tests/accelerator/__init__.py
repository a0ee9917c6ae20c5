"""Tests on accelerators: on GPUs, and on a simulated one, whose collectives hang as NCCL's do (``simulated``).

``target`` says on which devices a test runs, ``native`` has the simulated device and its process group backend in C++.
"""
