"""Other libraries' models on flexgen; each module needs its library, and importing flexgen imports none of them."""
