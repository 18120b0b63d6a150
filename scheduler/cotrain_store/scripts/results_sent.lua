-- results_sent: remove results from the unread ones after they were sent to their clients. Idempotent.
-- needs: unread
local args = cjson.decode(ARGV[1])

for _, sent in ipairs(args.sent) do
  record_read(sent.tenant, sent.request)
end
return 'OK'
