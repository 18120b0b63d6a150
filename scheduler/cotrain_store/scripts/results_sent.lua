-- results_sent: results were sent to their clients: they count as unread no more. Twice is harmless.
-- needs: unread
local args = cjson.decode(ARGV[1])

for _, sent in ipairs(args.sent) do
  note_read(sent.tenant, sent.request)
end
return 'OK'
