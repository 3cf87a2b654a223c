"""Optimal power flow on the 57 buses of IEEE, as in DC3 (Donti, Rolnick and Kolter, 2021).

python -m benchmarks.acopf
"""
