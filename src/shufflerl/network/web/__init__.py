"""What both servers share on HTTP: answers, limits, pages that tell how they are doing, and how others reach them."""
