"""Where privacy lives: noise laws, protocol, accounting, certificate, ledger and audit."""
