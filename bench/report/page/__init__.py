"""The HTML report of `bench report`: its contents and its template."""
