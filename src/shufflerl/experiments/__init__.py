"""Experiments: the paper's figures and ours, each a module with its sweep as constants and its analysis a function."""
