"""One page to read recorded samples: filters, and every token coloured by its log-probs."""
