-- results_read: shorten the lifetime of results that their clients have received.
-- needs: ages
local args = cjson.decode(ARGV[1])

for _, request in ipairs(args.requests) do
  end_sooner('cotrain:result:' .. request, args.ttl_ms)
end
return 'OK'
