"""A feed-forward of experts: how every token's are chosen, and the products of those that are."""
