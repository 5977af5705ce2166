"""Read results, compare configurations over seeds, and write tables, plots and the HTML report; without torch."""
