"""A node: plays one episode, adds its noise, seals every message and sends it once; and fleets of them."""
