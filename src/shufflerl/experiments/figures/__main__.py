"""`python -m shufflerl.experiments.figures [OUT]`: the documentation's figure of the paper's constants."""

from shufflerl.experiments.figures import elimination

if __name__ == "__main__":
    elimination.main()
