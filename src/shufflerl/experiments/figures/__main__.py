"""`python -m shufflerl.experiments.figures [OUT]`: the documentation's figure of the paper's constants."""

from shufflerl.experiments.figures import theorem

if __name__ == "__main__":
    theorem.main()
