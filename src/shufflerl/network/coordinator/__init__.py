"""The coordinator: reads messages but not where one came from; counts, charges the ledger and learns."""
