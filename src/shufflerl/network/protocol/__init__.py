"""What the roles say to each other: messages, seals, masks, what an announcement means and what it costs."""
