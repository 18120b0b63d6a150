-- weights_unused: list which of these weights are stored and nothing refers to.
-- needs: weights_in_use
local args, unused = cjson.decode(ARGV[1]), {}
for _, ref in ipairs(args.refs) do
  local row = redis.call('HMGET', 'cotrain:weights:' .. ref, 'record', 'digest', 'size', 'optimizer')
  if row[2] and row[2] ~= '' and not in_use(ref) then
    unused[#unused + 1] = row
  end
end
return unused
