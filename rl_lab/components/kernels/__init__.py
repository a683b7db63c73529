"""Fused operations of networks: each file has a plain torch form, which defines it, and the Triton kernel that is fast on CUDA."""
