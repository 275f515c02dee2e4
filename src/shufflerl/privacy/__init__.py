"""Where privacy lives: mechanism, accounting, sizing, protocol, certificate, ledger and audit."""
